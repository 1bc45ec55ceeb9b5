"""One end of a steered connection: its socket, and how many bytes went through user space there."""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress
from typing import TYPE_CHECKING

from kernel_steer.engine.wake import wait_readable, wait_writable
from kernel_steer.ports.endpoint import Backend

if TYPE_CHECKING:
    from kernel_steer.ports.link import Link

READ_BYTES = 65536
_FOREVER_S = 86400.0


class Lost(Exception):
    """The peer at this end is gone; what was on its way to it may be lost."""


class ClientLost(Lost):
    pass


class NodeLost(Lost):
    pass


class End:
    """A client's end, or a node's when `backend` is given. The socket is non-blocking."""

    def __init__(self, sock: socket.socket, backend: Backend | None = None, *, stall_s: float) -> None:
        self.sock = sock
        self.backend = backend
        self.read_count = 0  # bytes
        self.written = 0
        self.link: Link | None = None
        self.side = 0  # in the link
        self.accepted_base = 0  # what TCP had been given before, on the scale of tcp.progress
        self.settled = 0  # of the redirected bytes: known to be with TCP
        self.ended = False  # its peer sends nothing more
        self._stall_s = stall_s
        self._lost = NodeLost if backend else ClientLost

    async def read(self) -> bytes:
        """What comes next; nothing at the end. Raises Lost. A cancelled call has taken nothing."""
        while True:
            data = self.read_now()
            if data is not None:
                return data
            await wait_readable(self.sock, _FOREVER_S)

    def read_now(self) -> bytes | None:
        """None when there is nothing yet. Raises Lost."""
        try:
            data = self.sock.recv(READ_BYTES)
        except BlockingIOError:
            return None
        except OSError as error:
            raise self._lost(error.strerror) from error
        if self.link is not None and self.link.has_overlapped(self):
            raise self._lost("a retransmission overlapped")  # some of it came twice
        self.read_count += len(data)
        self.ended = self.ended or not data
        return data

    def kick(self) -> None:
        """Shows the kernel's program what was queued before the socket came to it: it does not look by itself."""
        self._peek()

    async def write(self, data: bytes) -> None:
        """Raises Lost; `written` has what TCP has taken until then."""
        view = memoryview(data)
        try:
            if self.link is not None and data:
                await self.link.settle(self)
            while view:
                try:
                    sent = self.sock.send(view)
                except BlockingIOError:
                    await wait_writable(self.sock, self._stall_s)
                    continue
                self.written += sent
                view = view[sent:]
        except (OSError, TimeoutError) as error:
            raise self._lost(str(error)) from error

    async def half_close(self) -> None:
        """Says that nothing more comes, after all that was sent. Raises Lost."""
        try:
            if self.link is not None:
                await self.link.settle(self)
            self.sock.shutdown(socket.SHUT_WR)
        except (OSError, TimeoutError) as error:
            raise self._lost(str(error)) from error

    def is_quiet(self) -> bool:
        """An idle node's connection that can be used: it is open and has nothing to say."""
        return not self.has_closed() and self._peek() is None

    def has_closed(self) -> bool:
        """Nothing more than what has come will come from this peer."""
        link = self.link
        if self.ended or (link is not None and (link.has_ended(self) or link.has_overlapped(self))):
            return True
        return self._peek() == b""

    def _peek(self) -> bytes | None:
        """None when there is nothing."""
        try:
            return self.sock.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return None
        except OSError:
            return b""

    def discard(self) -> None:
        """Throws away what has come. Raises Lost."""
        while self.read_now():
            pass

    async def linger(self, linger_s: float) -> None:
        """Lets the peer read the last words before the close: unread bytes would turn it into a reset."""
        with suppress(Lost, TimeoutError):
            async with asyncio.timeout(linger_s):
                await self.half_close()
                while await self.read():
                    pass

    def abort(self) -> None:
        """Closing will be a reset: a stream that was cut must not look as if it had ended."""
        with suppress(OSError):
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")

    def close(self) -> None:
        if self.link is not None:
            self.link.remove(self)
        self.sock.close()
