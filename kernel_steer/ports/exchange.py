"""One HTTP request and its response on their way through user space."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from enum import Enum, auto

from kernel_steer.ports.end import ClientLost, End, NodeLost
from kernel_steer.ports.http_framing import BadMessage, Framer, Phase, read_response_head

_EARLY_S = 300.0  # for the rest of a request whose response is complete


class Result(Enum):
    COMPLETE = auto()
    TUNNEL = auto()  # the node agreed to speak something else from here on
    UNANSWERED = auto()  # the node was lost and no byte of a response has been sent on
    CUT = auto()  # it was lost later
    BAD_REQUEST = auto()
    BAD_RESPONSE = auto()  # before a byte of it was sent on


class Exchange:
    """May begin in the middle: the kernel hands over between any two segments."""

    def __init__(
        self,
        *,
        method: bytes,
        request: Framer,
        unsent: bytes,
        replay: bytes | None,
        response: Framer | None = None,
        keep_alive: bool = True,
        on_boundary: Callable[[], None],
    ) -> None:
        """`unsent`: bytes of the request that no node has got. `replay`: all of it, if it may be sent twice.
        `response` is None before its head. `on_boundary` is called at the moment when the last byte is with
        the client's TCP, if the connection goes on: its next request may come at once."""
        self.method = method
        self.keep_alive = keep_alive  # the connection may go on afterwards
        self.replay = replay
        self.complaint = ""  # what was bad
        self.rest = b""  # what the client sent after this request
        self.request = request
        self._on_boundary = on_boundary
        self._unsent = unsent
        self._uploaded = False  # all of the request is with the node's TCP
        self._response = response
        self._head = b""  # of the response, as far as it has come
        self._begun = response is not None

    @property
    def may_go_elsewhere(self) -> bool:
        """Another node can be asked instead: no node has got a byte of it, or it may be sent twice."""
        return bool(self._unsent) or self.replay is not None

    @property
    def shows_its_end(self) -> bool:
        """The client can tell a response that was cut from a complete one."""
        return self._response is None or self._response.phase is not Phase.UNTIL_CLOSE

    async def run(self, client: End, backend: End) -> Result:
        """Raises ClientLost."""
        upload = asyncio.create_task(self._upload(client, backend))
        download = asyncio.create_task(self._download(client, backend))
        try:
            await asyncio.wait([upload, download], return_when=asyncio.FIRST_COMPLETED)
            if not download.done():
                await upload  # its failure ends the exchange
            result = await download
            if result is Result.COMPLETE and self.keep_alive:
                await self._rest_of_request(upload)
            return result
        except BadMessage as bad:
            self.complaint = str(bad)
            self.keep_alive = False
            if self._begun:
                return Result.CUT
            return Result.BAD_RESPONSE if download.done() else Result.BAD_REQUEST
        finally:
            for task in (upload, download):
                task.cancel()
                with suppress(asyncio.CancelledError, BadMessage, ClientLost, NodeLost):
                    await task

    def send_again(self) -> None:
        """To another node: forgets what the last one said of a head."""
        self._head = b""
        if self.replay is not None:
            self._unsent = self.replay

    async def _upload(self, client: End, backend: End) -> None:
        data, self._unsent, self._uploaded = self._unsent, b"", False
        before = backend.written
        try:
            await backend.write(data)
            while not self.request.is_over:
                received = await client.read()
                if not received:
                    raise ClientLost("in the middle of a request")
                used = self.request.feed(received)
                self.rest = received[used:]
                await backend.write(received[:used])
        except NodeLost:
            if backend.written == before:
                self._unsent = data
            # It may have answered before it closed: the other half finds out.
            return
        self._uploaded = True

    async def _rest_of_request(self, upload: asyncio.Task[None]) -> None:
        """The response may come early; the next one can only follow when this request is complete."""
        await asyncio.wait([upload], timeout=_EARLY_S)
        if upload.done():
            await upload
        self.keep_alive = self._uploaded

    async def _download(self, client: End, backend: End) -> Result:
        while self._response is None or not self._response.is_over:
            try:
                data = await backend.read()
            except NodeLost:
                data = b""
                if self._response is not None and self._response.phase is Phase.UNTIL_CLOSE:
                    return Result.CUT  # a reset is not the end of a body
            if not data:
                return self._at_end()
            if self._response is None:
                self._head += data
                if (result := await self._heads(client)) is not None:
                    return result
            else:
                await self._body(client, data)
        return Result.COMPLETE

    def _at_end(self) -> Result:
        if self._response is not None and self._response.phase is Phase.UNTIL_CLOSE:
            return Result.COMPLETE
        return Result.CUT if self._begun else Result.UNANSWERED

    async def _heads(self, client: End) -> Result | None:
        while self._head and (head := read_response_head(self._head, self.method)) is not None:
            if head.is_interim:
                await self._send(client, self._head[: head.length])
                self._head = self._head[head.length :]
                continue
            self.keep_alive = self.keep_alive and head.keep_alive
            self._response = head.body
            begin, self._head = self._head, b""
            if head.body.phase is Phase.TUNNEL:
                await self._send(client, begin)
                return Result.TUNNEL
            length = head.length + head.body.feed(begin[head.length :])
            self._refuse_excess(len(begin) - length)
            await self._send(client, begin[:length])
            return None
        return None

    async def _body(self, client: End, data: bytes) -> None:
        assert self._response is not None
        used = self._response.feed(data)
        self._refuse_excess(len(data) - used)
        await self._send(client, data[:used])

    def _refuse_excess(self, count: int) -> None:
        if count:  # it does not belong to any request
            self.keep_alive = False

    async def _send(self, client: End, data: bytes) -> None:
        self._begun = True
        self.replay = None
        await client.write(data)
        if self._response is None or not self._response.is_over or not self._uploaded:
            return
        if self.keep_alive and not self.rest:
            self._on_boundary()
