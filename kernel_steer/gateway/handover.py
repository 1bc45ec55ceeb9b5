"""One gateway follows another on the same port, and no client notices.

The listening socket itself is passed on (SCM_RIGHTS over a unix socket in the state folder). SO_REUSEPORT
would not do: each socket has a queue of its own, and what waits in the queue of one that is closed is reset.

    successor   connects                    incumbent   sends the listening socket
                starts up, accepts, "R"                 accepts no more, "D", drains, ends
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

log = logging.getLogger("kernel_steer.gateway")

_NAME = "handover.sock"
_READY, _DRAINING = b"R", b"D"
_PEER = struct.Struct("3i")  # pid, uid, gid
_ANSWER_S = 10.0


class Predecessor:
    """The gateway that had the port before. Its listener is ours as well; both may accept until `ready`."""

    def __init__(self, line: socket.socket, listener: socket.socket) -> None:
        self._line = line
        self.listener = listener

    @classmethod
    def find(cls, folder: Path) -> Predecessor | None:
        """None when no gateway works in that folder. Blocks for a moment."""
        line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        line.settimeout(_ANSWER_S)
        try:
            with _address(folder, _NAME) as address:
                line.connect(address)
            _, descriptors, _, _ = socket.recv_fds(line, 1, 1)
        except OSError:
            line.close()
            return None
        if not descriptors:  # it is draining already
            line.close()
            return None
        listener = socket.socket(fileno=descriptors[0])
        listener.setblocking(False)
        return cls(line, listener)

    def ready(self) -> None:
        """We accept: it need not any more. Returns when it does not; one that is silent is as good as gone."""
        with suppress(OSError):
            self._line.sendall(_READY)
            self._line.recv(1)
        self._line.close()


class Handover:
    """Waits for a successor, inside the event loop. `on_taken` is called when it accepts clients."""

    def __init__(self, folder: Path, listener: socket.socket, on_taken: Callable[[], None]) -> None:
        self._folder = folder
        self._listener = listener
        self._on_taken = on_taken
        self._line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._inode = 0
        self._waiting: asyncio.Task[None] | None = None
        self.taken = False

    def start(self) -> None:
        """From now on a successor finds us, and not whoever was found there before."""
        temporary = f"{_NAME}.{os.getpid()}"
        with _address(self._folder, temporary) as address:
            (self._folder / temporary).unlink(missing_ok=True)
            self._line.bind(address)
        (self._folder / temporary).chmod(0o600)
        self._inode = (self._folder / temporary).stat().st_ino
        (self._folder / temporary).replace(self._folder / _NAME)
        self._line.listen(4)
        self._line.setblocking(False)
        self._waiting = asyncio.get_running_loop().create_task(self._wait(), name="handover")

    async def _wait(self) -> None:
        loop = asyncio.get_running_loop()
        while not self.taken:
            line, _ = await loop.sock_accept(self._line)
            with line:
                line.setblocking(False)
                if _uid_of(line) not in {0, os.geteuid()}:
                    log.warning("a stranger asked for the listening socket")
                    continue
                with suppress(OSError):  # it went away before it was ready: we go on
                    socket.send_fds(line, [b"L"], [self._listener.fileno()])
                    if await loop.sock_recv(line, 1) == _READY:
                        self.taken = True
                        self._on_taken()
                        await loop.sock_sendall(line, _DRAINING)

    async def close(self) -> None:
        if self._waiting is not None and not self.taken:
            self._waiting.cancel()
        if self._waiting is not None:
            await asyncio.wait([self._waiting], timeout=1)
        self._line.close()
        with suppress(OSError):
            if (self._folder / _NAME).stat().st_ino == self._inode:
                (self._folder / _NAME).unlink()


def incumbent_pid(folder: Path) -> int | None:
    """The process that accepts clients for this folder's port; None when there is none."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line, suppress(OSError):
        with _address(folder, _NAME) as address:
            line.connect(address)
        return int(_PEER.unpack(line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))[0])
    return None


def _uid_of(line: socket.socket) -> int:
    return int(_PEER.unpack(line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))[1])


@contextmanager
def _address(folder: Path, name: str) -> Iterator[str]:
    """A path to it that is short enough for a unix socket, however long the folder's is. Raises OSError."""
    descriptor = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}/{name}"
    finally:
        os.close(descriptor)
