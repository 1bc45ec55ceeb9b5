"""The processes of a measurement, and what it needs from the machine."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from contextlib import suppress
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
        self.first: Any = self.hear()

    @property
    def pid(self) -> int:
        return int(self._process.pid)

    def hear(self) -> Any:
        """The next thing it says. Raises BenchFailed."""
        if not self._pipe.poll(PATIENCE_S):
            raise BenchFailed("a process does not answer")
        try:
            return self._pipe.recv()
        except EOFError:
            raise BenchFailed("a process has ended; its reason is above") from None

    def tell(self, order: str) -> None:
        self._pipe.send(order)

    def ask(self, order: str) -> Any:
        self.tell(order)
        return self.hear()

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


def raise_file_limit(wanted: int) -> int:
    """For this process and those it starts: as many open files as are wanted, or else as are allowed. Returns which."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for limit in (max(hard, wanted), hard):
        with suppress(ValueError, OSError):  # more than the hard limit takes CAP_SYS_RESOURCE
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(limit, wanted)), limit))
            break
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def wait_for(condition: Callable[[], bool], otherwise: str) -> None:
    """Raises BenchFailed, which says `otherwise`."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > deadline:
            raise BenchFailed(otherwise)
        time.sleep(0.0002)
