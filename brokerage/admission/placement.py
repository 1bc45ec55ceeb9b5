"""Which node gets the next leg. Answers from memory, in microseconds."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from brokerage.admission.snapshot import ReadyNode
from kernel_steer.admission import Node

FAILURE_PAUSE_S = 5.0
# A choice counts as load and fades with this half-life: about the length of an answer.
_HALF_LIFE_S = 10.0
_DECAY = math.log(2) / _HALF_LIFE_S


@dataclass(slots=True)
class _Load:
    """Legs given to a node, faded by age."""

    legs: float = 0.0
    at: float = 0.0

    def now(self, moment: float) -> float:
        return self.legs * math.exp(-_DECAY * (moment - self.at))

    def add(self, moment: float) -> None:
        self.legs, self.at = self.now(moment) + 1.0, moment


class Placement:
    """Remembers per node what the database cannot know yet: signals, failures, recent choices.

    All by epoch: a node that was started anew has a clean slate.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._pools: Mapping[str, tuple[ReadyNode, ...]] = {}
        self._drained: dict[str, int] = {}  # newest epoch that must get nothing
        self._paused: dict[tuple[str, int], float] = {}  # until
        self._load: dict[tuple[str, int], _Load] = {}

    def update(self, pools: Mapping[str, tuple[ReadyNode, ...]]) -> None:
        """The nodes that the database calls ready, by model. Forgets loads and pauses of others."""
        self._pools = pools
        present = {(ready.node.name, ready.node.epoch) for pool in pools.values() for ready in pool}
        moment = self._clock()
        self._load = {key: load for key, load in self._load.items() if key in present}
        self._paused = {key: until for key, until in self._paused.items() if until > moment}

    def drain(self, name: str, epoch: int) -> None:
        self._drained[name] = max(epoch, self._drained.get(name, epoch))

    def pause(self, name: str, epoch: int) -> None:
        self._paused[name, epoch] = self._clock() + FAILURE_PAUSE_S

    def choose(self, model: str, exclude: frozenset[str]) -> Node | None:
        """The usable node with the fewest recent legs per slot; by name among equals."""
        moment = self._clock()
        best: ReadyNode | None = None
        best_load = math.inf
        for ready in self._pools.get(model, ()):
            if not self._usable(ready.node, exclude, moment):
                continue
            known = self._load.get((ready.node.name, ready.node.epoch))
            load = (known.now(moment) if known else 0.0) / max(ready.slots, 1)
            if load < best_load:
                best, best_load = ready, load
        if best is None:
            return None
        self._load.setdefault((best.node.name, best.node.epoch), _Load(at=moment)).add(moment)
        return best.node

    def _usable(self, node: Node, exclude: frozenset[str], moment: float) -> bool:
        if node.name in exclude or node.epoch <= self._drained.get(node.name, -1):
            return False
        return self._paused.get((node.name, node.epoch), 0.0) <= moment
