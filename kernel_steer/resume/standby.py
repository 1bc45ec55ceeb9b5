"""Gets another node ready while the old one still speaks, so that the client sees no pause.

An answer that goes on from ids: the standby reads prompt and answer so far with one discarded token, then the
old leg is left at its next token. An answer that must be replayed: the replay is begun beside it and waits,
unread, in the socket's buffers; it is heard when the old node is gone, and dropped when the answer ends first.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import TYPE_CHECKING

from kernel_steer.admission import LegReport, Node
from kernel_steer.resume.leg import ClientLeft, Leg, LegFailed, LegRefused, Mode
from kernel_steer.resume.reader import LegReader
from kernel_steer.resume.work import SHADOWED, WARMED, LegLost

if TYPE_CHECKING:
    from kernel_steer.resume.choice import ChoiceRun

log = logging.getLogger(__name__)


class Standby:
    """One per choice."""

    def __init__(self, run: ChoiceRun) -> None:
        self._run = run
        self._preparing: asyncio.Task[None] | None = None
        self._node: Node | None = None  # chosen and warm
        self._leg: Leg | None = None  # a replay that nobody has listened to yet
        self._leaving = ""  # the node that it was begun for

    def prepare(self) -> None:
        """Once per node that goes away."""
        if self._run.current is not None and self._preparing is None:
            self._preparing = asyncio.get_running_loop().create_task(self._prepare())

    def stop(self) -> None:
        """The answer is over, or goes on without a standby."""
        if self._preparing is not None:
            self._preparing.cancel()
            self._preparing = None
        if self._node is not None:
            self._run.release(self._node)
            self._node = None
        if (leg := self.take_leg()) is not None:
            self._drop(leg)

    @property
    def has_leg(self) -> bool:
        return self._leg is not None

    def take_node(self) -> Node | None:
        node, self._node = self._node, None
        self.stop()
        return node

    def take_leg(self) -> Leg | None:
        """A replay that is under way. The caller closes it and releases its node."""
        leg, self._leg = self._leg, None
        return leg

    async def _prepare(self) -> None:
        run = self._run
        while not run.state.begun:  # noqa: ASYNC110 - in prefill there is nothing to continue from
            await asyncio.sleep(run.limits.poll_s)
        leaving = run.current
        if leaving is None:
            return
        node = run.choose_beside(leaving.node)
        if node is None:
            return  # the answer stays as long as its node does
        ready = False
        try:
            mode = run.mode_for(node)
            if mode is Mode.APPEND:
                await self._warm(node, leaving.node)
                self._node, run.carrier.leave = node, True
                ready = True
            elif mode is Mode.REPLAY:
                self._leg, self._leaving = await run.ask(node, mode), leaving.node.name
                ready = True
        except (LegFailed, LegRefused, ClientLeft, LegLost) as error:
            log.info("request %s: standby %s is not ready: %s", run.work.request_id, node.name, error)
        finally:
            if not ready:
                run.release(node)

    async def _warm(self, node: Node, leaving: Node) -> None:
        run = self._run
        read = run.state.prompt_tokens + run.state.completion_tokens
        leg = await run.ask(node, Mode.APPEND, tokens=1)
        await run.carrier.warm(leg)
        run.book.reports.append(LegReport(leg.number, node.name, read, 1, WARMED, read + 1, leaving.name))

    def _drop(self, leg: Leg) -> None:
        """Its cost is what it had said by now, as far as it has come here."""
        tokens = 0

        def count(event) -> None:  # type: ignore[no-untyped-def]
            nonlocal tokens
            tokens += len(event.token_ids)

        reader = LegReader(count)
        reader.feed(leg.rest)
        with suppress(OSError):
            while data := leg.sock.recv(65536):
                reader.feed(data)
        leg.sock.close()
        run = self._run
        run.release(leg.node)
        run.book.reports.append(
            LegReport(
                leg.number,
                leg.node.name,
                run.state.prompt_tokens,
                tokens,
                SHADOWED,
                run.state.prompt_tokens + tokens,
                self._leaving,
            )
        )
