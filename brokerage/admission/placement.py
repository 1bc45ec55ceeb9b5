"""Which node gets the next leg. Answers from memory, in microseconds."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from decimal import Decimal

from brokerage.admission.snapshot import ReadyNode
from kernel_steer.admission import Node

FAILURE_PAUSE_S = 5.0


class Placement:
    """Remembers per node what the database cannot know yet: signals, failures, open legs.

    All by epoch: a node that was started anew has a clean slate.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._pools: Mapping[str, tuple[ReadyNode, ...]] = {}
        self._drained: dict[str, int] = {}  # newest epoch that must get nothing
        self._paused: dict[tuple[str, int], float] = {}  # until
        self._legs: Counter[tuple[str, int]] = Counter()  # open ones of this gateway

    def update(self, pools: Mapping[str, tuple[ReadyNode, ...]]) -> None:
        """The nodes that the database calls ready, by model. Forgets pauses that are over."""
        self._pools = pools
        moment = self._clock()
        self._paused = {key: until for key, until in self._paused.items() if until > moment}

    def drain(self, name: str, epoch: int) -> None:
        self._drained[name] = max(epoch, self._drained.get(name, epoch))

    def restore(self, name: str, epoch: int) -> None:
        """Older incarnations stay drained: they are past."""
        if self._drained.get(name) == epoch:
            self._drained[name] = epoch - 1

    def pause(self, name: str, epoch: int) -> None:
        self._paused[name, epoch] = self._clock() + FAILURE_PAUSE_S

    def choose(self, model: str, exclude: frozenset[str]) -> Node | None:
        """The cheapest node with a free slot, else the one with the fewest legs per slot. Counts the leg.

        Among equals the least loaded, then the first by name. Silent nodes only when there is no other.
        """
        moment = self._clock()
        best: ReadyNode | None = None
        best_rank: tuple[bool, bool, Decimal, float] | None = None
        for ready in self._pools.get(model, ()):
            if not self._usable(ready.node, exclude, moment):
                continue
            load = self._legs[ready.node.name, ready.node.epoch] / max(ready.slots, 1)
            full = load >= 1
            rank = (ready.silent, full, Decimal(0) if full else ready.hourly_rate, load)
            if best_rank is None or rank < best_rank:
                best, best_rank = ready, rank
        if best is None:
            return None
        self._legs[best.node.name, best.node.epoch] += 1
        return best.node

    def release(self, name: str, epoch: int) -> None:
        self._legs[name, epoch] -= 1
        if self._legs[name, epoch] <= 0:
            del self._legs[name, epoch]

    def _usable(self, node: Node, exclude: frozenset[str], moment: float) -> bool:
        if node.name in exclude or node.epoch <= self._drained.get(node.name, -1):
            return False
        return self._paused.get((node.name, node.epoch), 0.0) <= moment
