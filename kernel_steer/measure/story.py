"""Flip after flip, with live connections beside them: what a door to two nodes does when the first one leaves."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from kernel_steer.measure.backend import NODES, run_backend
from kernel_steer.measure.load import Seen, run_load
from kernel_steer.measure.machine import BenchFailed, Part
from kernel_steer.measure.prober import run_prober

# The moment of a flip must not be in step with the prober.
_PAUSE_S = (0.002, 0.012)
_CONNECTIONS_PER_PROCESS = 4000


class Way(Protocol):
    """How those behind a door learn that the primary leaves, and that it is back."""

    def leave(self) -> int:
        """Returns when it began, in ns on CLOCK_MONOTONIC."""
        ...

    def come_back(self) -> None: ...


class Visitors:
    """The live connections to one door, and its prober. They rest outside of `with`."""

    def __init__(self, context: Any, ports: Sequence[int], *, flows: int, per_s: float) -> None:
        """The connections are spread evenly over the ports; the prober asks the first. Raises BenchFailed."""
        parts = -(-flows // _CONNECTIONS_PER_PROCESS)
        parts = -(-parts // len(ports)) * len(ports)
        bounds = [flows * number // parts for number in range(parts + 1)]
        self._loads = [
            Part(context, run_load, ports[number % len(ports)], end - first, per_s / parts, first)
            for number, (first, end) in enumerate(itertools.pairwise(bounds))
        ]
        self._prober = Part(context, run_prober, ports[0])
        self._current = ""

    def __enter__(self) -> Visitors:
        self._tell_all("go")
        if not self._current:
            self.wait_for(NODES[0])
        return self

    def __exit__(self, *_: Any) -> None:
        self._tell_all("rest")

    def _tell_all(self, order: str) -> None:
        for part in (*self._loads, self._prober):
            part.tell(order)

    def wait_for(self, node: str) -> int:
        """When the first byte came from there, in ns on CLOCK_MONOTONIC. Raises BenchFailed."""
        said = self._prober.hear()
        if said is None:
            raise BenchFailed("an answer was not what it should be, or the connection ended")
        self._current, first_ns = said
        if self._current != node:
            raise BenchFailed(f"node {self._current} answers instead of {node}")
        return int(first_ns)

    def leave(self) -> Seen:
        """What the live connections have seen."""
        self._tell_all("stop")
        total = Seen()
        for load in self._loads:
            for name, count in load.hear().items():
                setattr(total, name, getattr(total, name) + count)
        self.end()
        return total

    def end(self) -> None:
        for part in (*self._loads, self._prober):
            part.end()


def flip_many(
    visitors: Visitors, way: Way, count: int, say: Callable[[str], None] = lambda text: None
) -> list[float]:
    """Milliseconds from each signal to the first byte of the next answer from the standby. Raises BenchFailed."""
    times = []
    with visitors:
        for number in range(count):
            time.sleep(random.uniform(*_PAUSE_S))  # noqa: S311
            began_ns = way.leave()
            times.append((visitors.wait_for(NODES[1]) - began_ns) / 1e6)
            time.sleep(random.uniform(*_PAUSE_S))  # noqa: S311
            way.come_back()
            visitors.wait_for(NODES[0])
            if number % 50 == 49:
                say(f"{number + 1} of {count} flips")
    return times


def start_backends(context: Any) -> Sequence[Part]:
    """`first` of each is its port."""
    return [Part(context, run_backend, node) for node in NODES]
