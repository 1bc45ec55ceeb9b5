"""How often something may happen in this process: enough to keep a stranger's flood from becoming ours.

In memory on purpose: what it protects has to work while the cache is away.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict

_KEYS = 256


class Throttle:
    """At most `times` per `seconds` for each key; the least recent of more than a few hundred keys are forgotten."""

    def __init__(self, times: int, seconds: float) -> None:
        self.times = times
        self._seconds = seconds
        self._lock = threading.Lock()
        self._spent: OrderedDict[str, tuple[float, int]] = OrderedDict()

    def allows(self, key: str = "") -> bool:
        """Whether it may happen now; counts it if so."""
        now = time.monotonic()
        with self._lock:
            since, count = self._spent.get(key, (now, 0))
            if now - since >= self._seconds:
                since, count = now, 0
            if count >= self.times:
                return False
            self._spent[key] = (since, count + 1)
            self._spent.move_to_end(key)
            while len(self._spent) > _KEYS:
                self._spent.popitem(last=False)
            return True

    def forget(self) -> None:
        with self._lock:
            self._spent.clear()
