"""The listener's side: a node says that it goes, or that it stays after all, on some of the carriers."""

from __future__ import annotations

import threading
import time
from collections.abc import Set
from datetime import UTC, datetime, timedelta
from enum import StrEnum

from kernel_steer.measure.machine import wait_for
from kernel_steer.signals import CANCEL, GatewayBook, Signal, connect, publish

# Far away: what is under way may end where it is. Moving it is another measurement.
_DEADLINE = timedelta(minutes=5)


class Carrier(StrEnum):
    PINNED = "pinned"  # the map in the kernel, from another process of the gateway's host
    DATAGRAM = "datagram"
    STREAM = "stream"


ALL = frozenset(Carrier)
FROM_ELSEWHERE = frozenset({Carrier.DATAGRAM, Carrier.STREAM})


class Announcer:
    """Signs and sends as a node worker does, without the books."""

    def __init__(self, redis_url: str, key: bytes, node: str, epoch: int = 0) -> None:
        self._key = key
        self._node = node
        self._epoch = epoch
        self._stop = threading.Event()
        self._client = connect(redis_url)
        self._book = GatewayBook(connect(redis_url), self._stop)
        self._book.start()

    def wait_for_gateways(self, count: int, *, pinned: int = 0) -> None:
        """Raises BenchFailed."""
        wait_for(
            lambda: len(self._book.gateways) == count and self._book.own_host.engines >= pinned,
            "the gateways did not register for signals",
        )

    def say(self, carriers: Set[Carrier], *, leaves: bool) -> int:
        """Returns when it began, in ns on CLOCK_MONOTONIC."""
        now = datetime.now(UTC)
        began_ns = time.monotonic_ns()
        signal = Signal(
            self._node, self._epoch, "terminate" if leaves else CANCEL, "bench", now, now + _DEADLINE
        )
        if Carrier.PINNED in carriers:
            self._book.own_host.tell(signal)
        if Carrier.DATAGRAM in carriers:
            self._book.send(signal, self._key)
        if Carrier.STREAM in carriers:
            publish(self._client, signal, self._key)
        return began_ns

    def stop(self) -> None:
        self._stop.set()
        self._book.join()
        self._client.close()
