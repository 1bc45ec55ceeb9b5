"""A flow with its two ends, for tests of any engine."""

from __future__ import annotations

import asyncio
import socket

from kernel_steer.engine.base import LegEnd, LegEnded, NodeKey
from kernel_steer.engine.wake import ClientWatch
from kernel_steer.journal import Journal

NODE = NodeKey("a", 1)


def tcp_pair(family: int = socket.AF_INET) -> tuple[socket.socket, socket.socket]:
    """Two ends of a real TCP connection: an engine may refuse anything else."""
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.bind(("::1" if family == socket.AF_INET6 else "127.0.0.1", 0))
    listener.listen(1)
    near = socket.create_connection(listener.getsockname()[:2])
    far, _ = listener.accept()
    listener.close()
    for sock in (near, far):
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return near, far


class Stand:
    """A client, a node and a flow between them."""

    def __init__(self, engine, folder, *, gate=None, already_read=b"", family=socket.AF_INET) -> None:
        self.engine = engine
        self.client, self.ours = tcp_pair(family)
        self.node, self.backend = tcp_pair(family)
        self.journal = Journal(folder / "journal", slots=1)
        self.slot = self.journal.open()
        self.seen = 0
        self.watch = ClientWatch(self.ours)
        self.flow = engine.open_flow(
            watch=self.watch,
            backend=self.backend,
            node=NODE,
            slot=self.slot,
            gate=gate or self._pass_all,
            already_read=already_read,
        )

    def _pass_all(self, data: bytes) -> int:
        self.seen += len(data)
        return self.seen

    async def pump(self) -> LegEnd:
        try:
            while True:
                await self.flow.next(2)
        except LegEnded as end:
            return end.reason

    async def send(self, data: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self.node, data)

    async def receive(self, count: int) -> bytes:
        got = b""
        while len(got) < count:
            piece = await asyncio.get_running_loop().sock_recv(self.client, 65536)
            if not piece:
                break
            got += piece
        return got

    def close(self) -> None:
        self.watch.stop()
        self.flow.close()
        for sock in (self.client, self.ours, self.node):
            sock.close()
        self.journal.close()
