"""Waiting on non-blocking sockets inside asyncio, for several reasons at once."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable


class ClientWatch:
    """Notices that a client hangs up while nothing is written to it.

    It only peeks: pipelined bytes stay in the socket (a read would lose them for whoever reads next).
    Once such bytes are there, the end of the stream cannot be peeked any more and the next failed
    write has to tell.
    """

    def __init__(self, client: socket.socket) -> None:
        self.client = client
        self.gone = False
        self._listeners: set[Callable[[], None]] = set()
        self._watching = True
        asyncio.get_running_loop().add_reader(client.fileno(), self._on_readable)

    def _on_readable(self) -> None:
        try:
            self.gone = self.client.recv(1, socket.MSG_PEEK) == b""
        except BlockingIOError:
            return
        except OSError:
            self.gone = True
        self.stop()  # level-triggered: would fire for ever
        if self.gone:
            for listener in list(self._listeners):
                listener()

    def listen(self, listener: Callable[[], None]) -> None:
        self._listeners.add(listener)

    def unlisten(self, listener: Callable[[], None]) -> None:
        self._listeners.discard(listener)

    def stop(self) -> None:
        if self._watching:
            self._watching = False
            asyncio.get_running_loop().remove_reader(self.client.fileno())


async def wait_readable(sock: socket.socket, timeout_s: float, watch: ClientWatch | None = None) -> bool:
    """True when the socket can be read, False after the time or when the watched client left."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[bool] = loop.create_future()

    def finish(result: bool) -> None:
        if not done.done():
            done.set_result(result)

    def left() -> None:
        finish(False)

    loop.add_reader(sock.fileno(), finish, True)
    timer = loop.call_later(timeout_s, finish, False)
    if watch is not None:
        watch.listen(left)
        if watch.gone:
            left()
    try:
        return await done
    finally:
        timer.cancel()
        loop.remove_reader(sock.fileno())
        if watch is not None:
            watch.unlisten(left)


async def send_all(sock: socket.socket, data: bytes, stall_s: float) -> None:
    """Writes everything. Raises OSError, and TimeoutError after `stall_s` without progress."""
    view = memoryview(data)
    while view:
        try:
            sent = sock.send(view)
        except BlockingIOError:
            await wait_writable(sock, stall_s)
            continue
        view = view[sent:]


async def wait_writable(sock: socket.socket, timeout_s: float) -> None:
    """Raises TimeoutError."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()

    def finish() -> None:
        if not done.done():
            done.set_result(None)

    loop.add_writer(sock.fileno(), finish)
    try:
        await asyncio.wait_for(done, timeout_s)
    finally:
        loop.remove_writer(sock.fileno())
