"""Which node gets the next leg. Answers from memory, in microseconds."""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping

from brokerage.admission.snapshot import ReadyNode
from kernel_steer.admission import Node

FAILURE_PAUSE_S = 5.0
# How much more a node may cost that has the beginning of the conversation in its cache.
AFFINITY_PREMIUM = 1.5
# The least recently used are forgotten: some 200 bytes each.
PREFIXES_MAX = 20_000


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
        self._readers: OrderedDict[tuple[str, bytes], tuple[str, int]] = OrderedDict()

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

    def choose(self, model: str, exclude: frozenset[str], prefix: bytes = b"") -> Node | None:
        """The node that cheaply has room, else the one with the fewest legs per slot. Counts the leg.

        Cheapest is by expected cost (ReadyNode.cost), among equals the least loaded, then the first by name.
        The node that read the same `prefix` last comes before a cheaper one while it has room and costs at
        most AFFINITY_PREMIUM of it: what it has in its cache need not be read again. Silent nodes only when
        there is no other.
        """
        moment = self._clock()
        best: ReadyNode | None = None
        best_rank: tuple[bool, bool, float, float] | None = None
        familiar: ReadyNode | None = None
        read_by = self._readers.get((model, prefix)) if prefix else None
        for ready in self._pools.get(model, ()):
            node = ready.node
            if not self._usable(node, exclude, moment):
                continue
            load = self._legs[node.name, node.epoch] / max(ready.slots, 1)
            full = load >= 1
            if read_by == (node.name, node.epoch) and not full and not ready.silent:
                familiar = ready
            rank = (ready.silent, full, 0.0 if full else ready.cost, load)
            if best_rank is None or rank < best_rank:
                best, best_rank = ready, rank
        if best is None:
            return None
        if familiar is not None and familiar.cost <= best.cost * AFFINITY_PREMIUM:
            best = familiar
        self._legs[best.node.name, best.node.epoch] += 1
        if prefix:
            self._remember((model, prefix), (best.node.name, best.node.epoch))
        return best.node

    def _remember(self, what: tuple[str, bytes], reader: tuple[str, int]) -> None:
        self._readers[what] = reader
        self._readers.move_to_end(what)
        if len(self._readers) > PREFIXES_MAX:
            self._readers.popitem(last=False)

    def room(self, model: str) -> int | None:
        """Slots of all usable nodes of the model together; None when there are none."""
        moment = self._clock()
        usable = [
            ready.slots
            for ready in self._pools.get(model, ())
            if self._usable(ready.node, frozenset(), moment) and not ready.silent
        ]
        return sum(usable) if usable else None

    def release(self, name: str, epoch: int) -> None:
        self._legs[name, epoch] -= 1
        if self._legs[name, epoch] <= 0:
            del self._legs[name, epoch]

    def _usable(self, node: Node, exclude: frozenset[str], moment: float) -> bool:
        if node.name in exclude or node.epoch <= self._drained.get(node.name, -1):
            return False
        return self._paused.get((node.name, node.epoch), 0.0) <= moment
