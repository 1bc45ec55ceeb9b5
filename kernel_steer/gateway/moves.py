"""When answers leave a node that will be taken away.

Not at the notice: most answers end by themselves before the deadline, and a move costs the standby a look
at the prompt. What still runs shortly before the deadline is moved. A provider that strikes earlier than it
said finds answers on the node; those are resumed like after any loss.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime

from kernel_steer.engine.base import NodeKey
from kernel_steer.resume.choice import ChoiceRun

log = logging.getLogger(__name__)
# A standby must read the prompt of every answer in this time, all of them at once.
MARGIN_S = 20.0


class Moves:
    """The answers in work, choice by choice, and the nodes that go away. Used in the event loop only."""

    def __init__(self, margin_s: float = MARGIN_S) -> None:
        self._margin_s = margin_s
        self._runs: set[ChoiceRun] = set()
        self._timers: dict[NodeKey, asyncio.TimerHandle] = {}

    @contextmanager
    def tracking(self, runs: Sequence[ChoiceRun]) -> Iterator[None]:
        self._runs.update(runs)
        try:
            yield
        finally:
            self._runs.difference_update(runs)

    def leaving(self, node: NodeKey, deadline: datetime | None) -> None:
        """The node goes at `deadline` (aware UTC); without one, any moment."""
        left_s = (deadline - datetime.now(UTC)).total_seconds() if deadline else 0.0
        self.staying(node)
        loop = asyncio.get_running_loop()
        self._timers[node] = loop.call_later(max(0.0, left_s - self._margin_s), self._move, node)

    def staying(self, node: NodeKey) -> None:
        """The notice was taken back. An answer that has moved stays where it is now."""
        if (timer := self._timers.pop(node, None)) is not None:
            timer.cancel()

    def _move(self, node: NodeKey) -> None:
        self._timers.pop(node, None)
        moving = [run for run in self._runs if run.is_on(node.name, node.epoch)]
        if moving:
            log.info("moving %d answers off node %s (epoch %d)", len(moving), node.name, node.epoch)
        for run in moving:
            run.move()
