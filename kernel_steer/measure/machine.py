"""The processes of a measurement, and what it needs from the machine."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

PATIENCE_S = 30.0
_DATABASE = 15  # the last of those that every Redis has


class BenchFailed(RuntimeError):
    """The measurement could not be made; the message says where it stopped."""


class Part:
    """A process; `first` is the first thing it says."""

    def __init__(self, context: Any, target: Callable[..., None], *arguments: Any) -> None:
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=target, args=(theirs, *arguments), daemon=True)
        self._process.start()
        theirs.close()
        try:
            self.first: Any = self._receive()
        except EOFError:
            raise BenchFailed(f"{target.__name__} did not start; its reason is above") from None

    @property
    def pid(self) -> int:
        return int(self._process.pid)

    def _receive(self) -> Any:
        if not self._pipe.poll(PATIENCE_S):
            raise BenchFailed("a process does not answer")
        return self._pipe.recv()

    def tell(self, order: str) -> None:
        self._pipe.send(order)

    def ask(self, order: str) -> Any:
        self.tell(order)
        return self._receive()

    def end(self) -> None:
        self._process.join(0.5)
        self._process.kill()
        self._process.join()


def own_database(url: str) -> str:
    """The same server, apart from the platform's keys: its gateways must not hear our signals."""
    address, _, options = url.partition("?")
    if address.startswith("unix://"):
        return f"{address}?db={_DATABASE}"
    server = urlsplit(address)
    return f"{server.scheme}://{server.netloc}/{_DATABASE}" + (f"?{options}" if options else "")


def raise_file_limit(wanted: int) -> None:
    """For this process and those it starts. Raises BenchFailed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft >= wanted:
        return
    if hard != resource.RLIM_INFINITY:
        hard = max(hard, wanted)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (ValueError, OSError):
        raise BenchFailed(f"{wanted} open files are needed, this system allows {hard} (ulimit -n)") from None


def wait_for(condition: Callable[[], bool], otherwise: str) -> None:
    """Raises BenchFailed, which says `otherwise`."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > deadline:
            raise BenchFailed(otherwise)
        time.sleep(0.0002)
