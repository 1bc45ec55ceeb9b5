"""Who an answer is told to: one client, or all that sent the same request."""

from __future__ import annotations

from typing import Protocol

from kernel_steer.engine.wake import ClientWatch
from kernel_steer.gateway.audience import Audience, AudienceSink
from kernel_steer.gateway.http import ClientConnection, ConnectionClosed
from kernel_steer.resume.sink import ClientGone, StreamSink


class Hearer(Protocol):
    @property
    def watch(self) -> ClientWatch: ...

    def stream(self, head: bytes) -> StreamSink:
        """For an answer that is told event by event."""
        ...

    async def document(self, data: bytes) -> None:
        """A whole HTTP answer. Raises ConnectionClosed when nobody took it."""
        ...


class OneClient:
    def __init__(self, connection: ClientConnection) -> None:
        self._connection = connection
        self.watch = ClientWatch(connection.sock)

    def stream(self, head: bytes) -> StreamSink:
        return StreamSink(self.watch, head)

    async def document(self, data: bytes) -> None:
        await self._connection.write(data)


class ManyClients:
    def __init__(self, audience: Audience) -> None:
        self.watch = audience

    def stream(self, head: bytes) -> StreamSink:
        return AudienceSink(self.watch, head)

    async def document(self, data: bytes) -> None:
        try:
            await self.watch.say(data)
        except ClientGone as error:
            raise ConnectionClosed from error
