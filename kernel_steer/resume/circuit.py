"""When a node is left alone by everybody, and when only by the request that it failed.

A request that makes a node fail may be to blame itself: an input that its engine cannot bear fails on every
node it is sent to. Whoever sends such requests must not be able to close the pool for the others. So what a
node does to one customer counts for that customer's request alone; its circuit opens when it cannot be
reached at all, or when requests of several customers fail on it with no success in between.

    closed -> open for a pause -> half open: one leg tries -> closed again, or open for twice the pause
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

CUSTOMERS_MIN = 2
PAUSE_S, PAUSE_MAX_S = 5.0, 60.0
MEMORY_S = 30.0  # a failure that is older says nothing about now


@dataclass(slots=True)
class _Circuit:
    failures: dict[str, float] = field(default_factory=dict)  # customer -> when
    open_until: float = 0.0
    pause_s: float = PAUSE_S
    is_open: bool = False
    probing: bool = False  # half open, and somebody tries


class Circuits:
    """One per gateway; a node is its name and epoch, so a node that was started anew has a clean slate."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._circuits: dict[tuple[str, int], _Circuit] = {}
        self._resting: dict[tuple[str, int], float] = {}  # until
        self.opened = 0

    def rest(self, name: str, epoch: int, seconds: float) -> None:
        """The node asked for it (`Retry-After`). It is well, so nothing is held against it."""
        now = self._clock()
        self._resting = {key: until for key, until in self._resting.items() if until > now}
        self._resting[name, epoch] = max(now + seconds, self._resting.get((name, epoch), now))

    def resting(self, name: str, epoch: int) -> bool:
        """Whether it would refuse a leg anyway; unlike an open circuit that is no matter of choice."""
        return self._clock() < self._resting.get((name, epoch), float("-inf"))

    def closed_to(self, name: str, epoch: int) -> bool:
        """Whether a new leg should keep off this node."""
        circuit = self._circuits.get((name, epoch))
        if circuit is None or not circuit.is_open:
            return False
        return circuit.probing or self._clock() < circuit.open_until

    def begin(self, name: str, epoch: int) -> None:
        """A leg is about to be opened: on a half-open circuit it is the one that tries."""
        circuit = self._circuits.get((name, epoch))
        if circuit is not None and circuit.is_open:
            circuit.probing = True

    def worked(self, name: str, epoch: int) -> None:
        """The node has said something: whatever was held against it is over."""
        self._circuits.pop((name, epoch), None)

    def ended(self, name: str, epoch: int) -> None:
        """The leg is over. Without a verdict (its client left), the next one may try."""
        circuit = self._circuits.get((name, epoch))
        if circuit is not None:
            circuit.probing = False

    def failed(self, name: str, epoch: int, customer: str, *, unreachable: bool = False) -> bool:
        """A failure of the node's making. Returns whether its circuit opened with it."""
        self._forget_other_epochs(name, epoch)
        circuit = self._circuits.setdefault((name, epoch), _Circuit())
        now = self._clock()
        circuit.failures[customer] = now
        circuit.failures = {who: at for who, at in circuit.failures.items() if now - at < MEMORY_S}
        if circuit.is_open and not circuit.probing:
            return False
        if not (unreachable or circuit.probing or len(circuit.failures) >= CUSTOMERS_MIN):
            return False
        if circuit.probing:
            circuit.pause_s = min(2 * circuit.pause_s, PAUSE_MAX_S)
        circuit.is_open, circuit.probing = True, False
        circuit.open_until = now + circuit.pause_s
        self.opened += 1
        return True

    def _forget_other_epochs(self, name: str, epoch: int) -> None:
        for key in [key for key in self._circuits if key[0] == name and key[1] != epoch]:
            del self._circuits[key]

    @property
    def open_nodes(self) -> list[str]:
        """Names of nodes that are open or half open, for the health matrix."""
        return sorted(name for (name, _), circuit in self._circuits.items() if circuit.is_open)
