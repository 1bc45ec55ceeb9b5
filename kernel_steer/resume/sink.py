"""Where an answer goes: to a streaming client, or into one JSON document at the end."""

from __future__ import annotations

from typing import Any, Protocol

from kernel_steer.engine.relay import CLIENT_STALL_S
from kernel_steer.engine.wake import ClientWatch, send_all
from kernel_steer.resume.chunked import ChunkedDecoder
from kernel_steer.resume.joint import PING_EVENT, Joint


class ClientGone(Exception):
    """The client's connection does not take any more bytes."""


class Sink(Protocol):
    """As much of a client as a leg needs."""

    @property
    def streaming(self) -> bool: ...

    @property
    def watch(self) -> ClientWatch: ...

    @property
    def begun(self) -> bool:
        """The status line is out: what goes wrong from now on can only be said inside the stream."""
        ...

    @property
    def untouched(self) -> bool:
        """No event was told yet, so that an engine may forward a leg as it is."""
        ...

    async def begin(self, node_name: str) -> None: ...

    async def event(self, body: dict[str, Any]) -> None: ...

    async def ping(self) -> None: ...


class StreamSink:
    """A client that reads server-sent events. Raises ClientGone from every write."""

    streaming = True

    def __init__(self, watch: ClientWatch, head: bytes) -> None:
        self.watch = watch
        self._head: bytes | None = head
        self.joint = Joint(ChunkedDecoder())
        self._told = False

    @property
    def begun(self) -> bool:
        """See Sink."""
        return self._head is None

    @property
    def untouched(self) -> bool:
        """See Sink. Pings do not count: they are whole, in chunks of their own."""
        return self.joint.decoder.position == 0 and not self.joint.begun and not self._told

    async def begin(self, node_name: str) -> None:
        if self._head is not None:
            head, self._head = self._head, None
            await self._send(head.replace(b"{node}", node_name.encode("ascii", "replace")))

    async def event(self, body: dict[str, Any]) -> None:
        self._told = True
        await self._send(self.joint.frame(self.joint.event(body)))

    async def ping(self) -> None:
        """Keeps proxies and clients from giving up. Never inside an event."""
        if self.begun and not self.joint.mid_event:
            await self._send(self.joint.frame(PING_EVENT))

    async def error(self, error: dict[str, Any]) -> None:
        """One honest error event; the body ends, without [DONE]."""
        await self._send(self.joint.frame(self.joint.event({"error": error})) + self.joint.last_chunk())

    async def finish(self, *, done: bool) -> None:
        """Ends the body; `done` when [DONE] was told already."""
        last = b"" if done else self.joint.frame(self.joint.done_event())
        await self._send(last + self.joint.last_chunk())

    async def _send(self, data: bytes) -> None:
        try:
            await send_all(self.watch.client, data, CLIENT_STALL_S)
        except (OSError, TimeoutError) as error:
            raise ClientGone from error


class CollectSink:
    """A client that waits for the whole answer; nothing is delivered before it is complete."""

    streaming = begun = untouched = False

    def __init__(self, watch: ClientWatch) -> None:
        self.watch = watch

    async def begin(self, node_name: str) -> None:
        """The head is written with the document."""

    async def event(self, body: dict[str, Any]) -> None:
        """The state has it already."""

    async def ping(self) -> None:
        """An answer that has not begun has no place for one."""
