"""Bytes both ways until both sides have closed: plain TCP, and what an Upgrade leads to."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from enum import Enum, auto

from kernel_steer.ports.connection import Connection
from kernel_steer.ports.end import ClientLost, End, Lost, NodeLost
from kernel_steer.ports.endpoint import Mode
from kernel_steer.ports.http_framing import Phase


class _Turn(Enum):
    QUIET = auto()  # nothing is under way in user space: the kernel can carry on
    MOVE = auto()  # the connection is idle and its node is not good any more
    ENDED = auto()  # one direction has


class Tunnel:
    """Of a connection whose node is pinned."""

    def __init__(self, connection: Connection, *, idle_ms: int | None = None) -> None:
        """With `idle_ms` the connection goes to another node when no byte came for so long and its node
        is flipped away or has closed. Without it the node stays what it is."""
        self._connection = connection
        self._client = connection.client
        self._idle_ns = None if idle_ms is None else idle_ms * 1_000_000
        self._last_ns = time.monotonic_ns()
        self._writing = 0
        self._held = b""  # bytes of the client that no node has got

    async def run(self, first: bytes = b"") -> None:
        """`first`: what the client has sent already. Raises Lost when a side is reset."""
        self._held = first
        over = False
        while not over:
            if self._connection.link is not None and not self._held:
                await self._carried()
            over = await self._pump()

    @property
    def _node(self) -> End:
        return self._connection.backends[self._connection.pinned]

    async def _carried(self) -> None:
        """Lets the kernel carry the connection until user space is needed."""
        connection, link = self._connection, self._connection.link
        assert link is not None
        if self._client.ended or self._node.ended:
            return
        link.set_boundary(pinned=connection.pinned, first=connection.pinned, phase=Phase.TUNNEL)
        link.set_last_ns(self._last_ns)
        while True:
            link.start(attention=connection.is_unwanted(self._node))
            await link.sleep()
            connection.take_over()
            self._last_ns = max(self._last_ns, link.last_ns)
            connection.housekeep()
            both = self._client, self._node
            if any(map(link.has_overlapped, both)):
                raise ClientLost("a retransmission overlapped")
            if any(map(link.has_unread, both)) or any(map(link.has_ended, both)):
                connection.stats.to_user_space += 1
                return

    async def _pump(self) -> bool:
        """Carries it here. False when it may go to the kernel, True when it is over."""
        node = self._node
        turns = {
            asyncio.create_task(self._from_client(node)),
            asyncio.create_task(self._from_node(node)),
        }
        try:
            while turns:
                done, turns = await asyncio.wait(turns, return_when=asyncio.FIRST_COMPLETED)
                errors = [error for turn in done if (error := turn.exception())]
                if errors:
                    raise errors[0]
                results = [turn.result() for turn in done]
                if _Turn.MOVE in results:
                    await self._stop(turns)
                    return not await self._move()
                if _Turn.QUIET in results and len(turns) == 1:
                    return False
            return True
        finally:
            await self._stop(turns)

    @staticmethod
    async def _stop(turns: set[asyncio.Task[_Turn]]) -> None:
        """They wait for bytes, so nothing that was read is lost."""
        for turn in turns:
            turn.cancel()
            with suppress(asyncio.CancelledError, Lost):
                await turn

    async def _from_client(self, node: End) -> _Turn:
        while True:
            data = self._held or await self._client.read()
            if not data:
                await node.half_close()
                return _Turn.ENDED
            self._held = data
            if self._is_idle() and self._should_leave(node):
                return _Turn.MOVE
            await self._write(node, data)
            self._held = b""
            if self._is_quiet(node):
                return _Turn.QUIET

    async def _from_node(self, node: End) -> _Turn:
        while True:
            try:
                data = await node.read()
            except NodeLost:
                if not self._is_idle():
                    raise
                return _Turn.MOVE
            if not data:
                if self._is_idle() and not self._client.ended:
                    return _Turn.MOVE
                await self._client.half_close()
                return _Turn.ENDED
            await self._write(self._client, data)
            if self._is_quiet(node):
                return _Turn.QUIET

    async def _write(self, end: End, data: bytes) -> None:
        self._writing += 1
        try:
            await end.write(data)
        finally:
            self._writing -= 1
            self._last_ns = time.monotonic_ns()

    def _is_idle(self) -> bool:
        if self._idle_ns is None or self._writing:
            return False
        return time.monotonic_ns() - self._last_ns >= self._idle_ns

    def _should_leave(self, node: End) -> bool:
        """A node that lives is only left for another one."""
        connection = self._connection
        if node.has_closed():
            return True
        if not connection.is_flipped(node) and not connection.is_unwanted(node):
            return False
        return connection.usable() not in (0, connection.pinned)

    def _is_quiet(self, node: End) -> bool:
        link = self._connection.link
        if link is None or self._writing or self._client.ended or node.ended:
            return False
        return not link.has_unread(self._client) and not link.has_unread(node) and link.keeps_up()

    async def _move(self) -> bool:
        """To another node. False when there is none: then the end of this one is passed on."""
        connection, node = self._connection, self._node
        if node.has_closed():
            connection.drop(connection.pinned)
        side = await connection.find()
        if not side:
            connection.stats.cut += 1
            return False
        connection.pin(side)
        connection.housekeep()
        return True


class TcpConnection(Connection):
    """Any protocol over TCP, as long as an idle connection may go on at another node."""

    mode = Mode.TCP

    async def serve(self) -> None:
        """See Connection.run."""
        side = await self.find()
        if not side:
            self.stats.unserved += 1
            return
        self.pin(side)
        await Tunnel(self, idle_ms=self.endpoint.idle_ms).run()

    def is_fit(self, end: End) -> bool:
        """What a node says before the connection comes to it is not for this client: it is thrown away.
        Except for the first node's greeting."""
        with suppress(Lost):
            if self.pinned and end is not self.backends.get(self.pinned):
                end.discard()
            return not end.has_closed()
        return False
