"""One request to a third party's API, as a leg like any other.

TLS is taken off here: what the API says is written into one end of a socket pair, and the other end is the leg's
socket. So an answer that comes by TLS is carried, left and cut like one of our own nodes, and only its first hop
is user space's.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any

import orjson

from kernel_steer.admission import Node, Upstream
from kernel_steer.engine.base import BadLeg
from kernel_steer.engine.wake import ClientWatch
from kernel_steer.resume.chunked import ChunkedDecoder, Phase
from kernel_steer.resume.leg import (
    ERROR_BYTES_MAX,
    HEAD_BYTES_MAX,
    ClientLeft,
    Leg,
    LegFailed,
    LegRefused,
    Mode,
    busy_or_broken,
    parse_head,
    refused,
)
from kernel_steer.upstream.connection import CannotConnect, Connection, Connections

# What a third party says with them is about the request; with any other 4xx it is about what staff have set.
_OF_THE_REQUEST = (400, 413, 422)
_READ_BYTES = 32768
_ERROR_READ_S = 2.0
# After [DONE] nobody listens any more, and the end of the body makes the connection good for another answer.
_LAST_BYTES_S = 1.0


class Upstreams:
    """Of one gateway."""

    def __init__(self, connections: Connections | None = None) -> None:
        self.connections = connections or Connections()
        self._pumps: set[asyncio.Task[None]] = set()

    async def open_leg(
        self,
        *,
        number: int,
        node: Node,
        mode: Mode,
        path: str,
        body: dict[str, Any],
        request_id: str,
        timeout_s: float,
        watch: ClientWatch | None,
    ) -> Leg:
        """See resume.leg.open_leg. No message that it raises has the key in it."""
        assert node.upstream is not None
        request = _request(node, node.upstream, path, body, request_id)
        asking = self._ask(node, request)
        connection, status, headers = await _unless_client_leaves(asking, timeout_s, watch)
        try:
            if status != 200:
                raise await _failure(connection, status, headers, node.upstream, str(body["model"]))
            if headers.get("transfer-encoding", "").lower() != "chunked":
                raise LegFailed("the answer is not chunked")
        except BaseException:
            connection.drop()
            raise
        ours, theirs = socket.socketpair()
        for end in (ours, theirs):
            end.setblocking(False)
        keep = headers.get("connection", "").lower() != "close"
        pump = asyncio.get_running_loop().create_task(self._pump(node, connection, theirs, keep=keep))
        self._pumps.add(pump)
        pump.add_done_callback(self._pumps.discard)
        return Leg(number, node, ours, b"", mode)

    async def _ask(self, node: Node, request: bytes) -> tuple[Connection, int, dict[str, str]]:
        """Raises LegFailed. A kept connection may be one that the other side is closing just now: then once more."""
        if (kept := self.connections.take_idle(node)) is not None:
            with suppress(LegFailed):
                return await _exchange(kept, request)
        try:
            connection = await self.connections.connect(node)
        except CannotConnect as error:
            raise LegFailed(str(error), unreachable=True) from error
        return await _exchange(connection, request)

    async def _pump(self, node: Node, connection: Connection, out: socket.socket, *, keep: bool) -> None:
        """Brings the body to the leg, no faster than that is read."""
        loop = asyncio.get_running_loop()
        decoder, done_said, left = ChunkedDecoder(), False, False
        tail = b""

        def leave() -> None:
            nonlocal left
            left = True
            loop.remove_reader(out.fileno())
            if done_said:
                loop.call_later(_LAST_BYTES_S, drop_unless_ended)
            else:
                connection.drop()

        def drop_unless_ended() -> None:
            if decoder.phase is not Phase.END:
                connection.drop()

        loop.add_reader(
            out.fileno(), leave
        )  # nothing is ever written there: it is readable when it was closed
        try:
            while decoder.phase is not Phase.END:
                data = await connection.reader.read(_READ_BYTES)
                if not data:
                    break
                tail = tail[-16:] + data
                done_said = done_said or b"data: [DONE]" in tail or b"data:[DONE]" in tail
                for _ in decoder.feed(data):
                    pass
                if not left:
                    await _send(loop, out, data)
        except (OSError, BadLeg):
            pass  # the leg finds its end without a last chunk, as with any node
        finally:
            if not left:
                loop.remove_reader(out.fileno())
            out.close()
            if decoder.phase is Phase.END and keep:
                self.connections.give(node, connection)
            else:
                connection.drop()

    def close(self) -> None:
        for pump in self._pumps:
            pump.cancel()
        self.connections.close()


async def _send(loop: asyncio.AbstractEventLoop, out: socket.socket, data: bytes) -> None:
    """Whoever listened may be gone; that is seen elsewhere."""
    with suppress(BrokenPipeError, ConnectionResetError):
        await loop.sock_sendall(out, data)


def _request(node: Node, upstream: Upstream, path: str, body: dict[str, Any], request_id: str) -> bytes:
    payload = orjson.dumps(body | {"model": upstream.model})
    host = f"[{node.host}]" if ":" in node.host else node.host
    lines = [
        f"POST {upstream.base_path}{path.removeprefix('/v1')} HTTP/1.1",
        f"Host: {host}" + ("" if node.port == 443 else f":{node.port}"),
        "Content-Type: application/json",
        "Accept: text/event-stream",
        "Accept-Encoding: identity",
        "User-Agent: apex-gateway",
        f"X-Request-ID: {request_id}",
        f"Content-Length: {len(payload)}",
    ]
    if upstream.api_key:
        lines.append(f"Authorization: Bearer {upstream.api_key}")
    return "\r\n".join([*lines, "", ""]).encode("ascii") + payload


async def _exchange(connection: Connection, request: bytes) -> tuple[Connection, int, dict[str, str]]:
    """Sends the request, reads the head of its answer. Raises LegFailed; then the connection is dropped."""
    try:
        connection.writer.write(request)
        await connection.writer.drain()
        while True:
            head = await connection.reader.readuntil(b"\r\n\r\n")
            if len(head) > HEAD_BYTES_MAX:
                raise LegFailed("a head without end")
            status, headers = parse_head(head)
            if status >= 200:  # before it there may be hints
                return connection, status, headers
    except asyncio.IncompleteReadError as error:
        connection.drop()
        raise LegFailed("connection closed before the answer") from error
    except (OSError, asyncio.LimitOverrunError) as error:
        connection.drop()
        raise LegFailed(f"connection lost: {type(error).__name__}") from error
    except BaseException:
        connection.drop()
        raise


async def _unless_client_leaves(
    asking: Coroutine[Any, Any, tuple[Connection, int, dict[str, str]]],
    timeout_s: float,
    watch: ClientWatch | None,
) -> tuple[Connection, int, dict[str, str]]:
    """Raises ClientLeft, and LegFailed after the time; what was begun is cancelled then."""
    loop = asyncio.get_running_loop()
    left: asyncio.Future[None] = loop.create_future()

    def leave() -> None:
        if not left.done():
            left.set_result(None)

    task = loop.create_task(asking)
    if watch is not None:
        watch.listen(leave)
        if watch.gone:
            leave()
    try:
        either: set[asyncio.Future[Any]] = {task, left}
        await asyncio.wait(either, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientLeft if left.done() else LegFailed("no answer in time")
    finally:
        if watch is not None:
            watch.unlisten(leave)
        if not task.done():
            task.cancel()
            await asyncio.wait({task})
            if not task.cancelled() and task.exception() is None:
                task.result()[0].drop()


async def _failure(
    connection: Connection, status: int, headers: dict[str, str], upstream: Upstream, asked_model: str
) -> LegFailed | LegRefused:
    """Whose fault it is. What a third party says of our key, our account or its model names is not told on."""
    if status >= 500 or status in (408, 429):
        return busy_or_broken(status, headers)
    if status not in _OF_THE_REQUEST:
        what = {401: "our key", 403: "our key", 402: "our account", 404: "our path or model"}.get(
            status, "our requests"
        )
        # Some say 402 and 403 of single requests too (of long ones when credit is low, of what they find indecent).
        # One customer's must not close the node to all, so for these its circuit decides.
        return LegFailed(
            f"the API does not take {what}: status {status}",
            misconfigured=status not in (402, 403),
            status=status,
        )
    refusal = refused(status, await _error_body(connection, headers))
    message = refusal.message.replace(upstream.model, asked_model)
    if upstream.api_key:
        message = message.replace(upstream.api_key, "…")
    return LegRefused(status, message, refusal.code, refusal.param)


async def _error_body(connection: Connection, headers: dict[str, str]) -> bytes:
    """As much of it as comes in time; empty when it does not."""
    try:
        async with asyncio.timeout(_ERROR_READ_S):
            if headers.get("transfer-encoding", "").lower() == "chunked":
                decoder, payload = ChunkedDecoder(), b""
                while decoder.phase is not Phase.END and len(payload) < ERROR_BYTES_MAX:
                    if not (data := await connection.reader.read(_READ_BYTES)):
                        break
                    payload += b"".join(piece.payload for piece in decoder.feed(data))
                return payload
            length = int(headers.get("content-length", "0"))
            return await connection.reader.readexactly(min(length, ERROR_BYTES_MAX))
    except (OSError, TimeoutError, ValueError, BadLeg, asyncio.IncompleteReadError):
        return b""
