"""A running metadata service, and machines on it to which things happen."""

from __future__ import annotations

import json
import threading
import urllib.request
from typing import Any


class Machine:
    """One instance of a running metadata service, and what happens to it."""

    def __init__(self, base: str, name: str) -> None:
        self.name = name
        self.url = f"{base}/{name}"

    def order(self, **order: Any) -> dict[str, Any]:
        request = urllib.request.Request(f"{self.url}/_control", data=json.dumps(order).encode())
        with urllib.request.urlopen(request) as response:
            return json.load(response)

    @property
    def counters(self) -> dict[str, Any]:
        with urllib.request.urlopen(f"{self.url}/_control") as response:
            return json.load(response)


def wait_for_polls(machine: Machine, count: int) -> None:
    """Until `count` more requests have come in."""
    goal = machine.counters["requests"] + count
    for _ in range(2_000):
        if machine.counters["requests"] >= goal:
            return
        threading.Event().wait(0.005)
    raise AssertionError("the listener stopped asking")
