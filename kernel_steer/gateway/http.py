"""HTTP/1.1 on a raw client socket.

The gateway owns the socket's descriptor because an engine may hand it to the kernel: no transport or
framework may have read ahead of it. The head is parsed by httptools; the body is read here, so that
not one byte of a pipelined next request is consumed.
"""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

import httptools
import orjson

from kernel_steer.admission import Refusal
from kernel_steer.engine.base import BadLeg
from kernel_steer.engine.wake import send_all, wait_readable
from kernel_steer.resume.chunked import ChunkedDecoder, Phase

HEAD_BYTES_MAX = 16384
BODY_BYTES_MAX = 4 << 20
IDLE_S = 75.0
READ_S = 30.0
WRITE_STALL_S = 30.0
_READ_BYTES = 65536


_ONLY_ONCE = {"content-length", "transfer-encoding", "authorization", "host", "idempotency-key"}


class ConnectionClosed(Exception):
    """The client is gone or was silent for too long; there is nobody to answer."""


@dataclass(slots=True)
class Request:
    method: str
    path: str
    headers: dict[str, str]
    body: bytes = b""
    keep_alive: bool = True
    expects_continue: bool = False


@dataclass(slots=True)
class _Parsed:
    url: bytes = b""
    headers: list[tuple[str, str]] = field(default_factory=list)

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.decode("latin-1").lower(), value.decode("latin-1")))


class ClientConnection:
    """Reads requests one by one and writes answers. The socket is non-blocking."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._buffer = b""

    async def read_request(self) -> Request:
        """Raises ConnectionClosed, or Refusal after which the connection cannot be used again."""
        head = await self._read_head()
        request = _parse_head(head)
        length = _declared_length(request.headers)
        if request.expects_continue:
            await self.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if "chunked" in request.headers.get("transfer-encoding", "").lower():
            request.body = await self._read_chunked()
        else:
            request.body = await self._read_sized(length)
        return request

    async def _read_head(self) -> bytes:
        timeout_s = IDLE_S
        while (end := self._buffer.find(b"\r\n\r\n")) < 0:
            if len(self._buffer) > HEAD_BYTES_MAX:
                raise Refusal(431, "headers_too_large", f"The request head is over {HEAD_BYTES_MAX} bytes")
            await self._fill(timeout_s)
            timeout_s = READ_S
        head, self._buffer = self._buffer[: end + 4], self._buffer[end + 4 :]
        return head

    async def _read_sized(self, length: int) -> bytes:
        while len(self._buffer) < length:
            await self._fill(READ_S)
        body, self._buffer = self._buffer[:length], self._buffer[length:]
        return body

    async def _read_chunked(self) -> bytes:
        decoder = ChunkedDecoder()
        body = b""
        while True:
            data, self._buffer = self._buffer, b""
            before = decoder.position
            try:
                for piece in decoder.feed(data):
                    body += piece.payload
                    if decoder.phase is Phase.END:
                        self._buffer = data[piece.end - before :]
                        return body
            except BadLeg:
                raise Refusal(400, "bad_request", "The chunked body is malformed") from None
            if len(body) > BODY_BYTES_MAX:
                raise _too_large()
            await self._fill(READ_S)

    async def _fill(self, timeout_s: float) -> None:
        try:
            data = self.sock.recv(_READ_BYTES)
        except BlockingIOError:
            if not await wait_readable(self.sock, timeout_s):
                raise ConnectionClosed from None
            await self._fill(timeout_s)
            return
        except OSError:
            raise ConnectionClosed from None
        if not data:
            raise ConnectionClosed
        self._buffer += data

    async def wait_for_more(self) -> None:
        """Returns when the next request has begun. Raises ConnectionClosed when none came for IDLE_S."""
        if not self._buffer and not await wait_readable(self.sock, IDLE_S):
            raise ConnectionClosed

    @property
    def has_more(self) -> bool:
        """A pipelined request has been read already."""
        return bool(self._buffer)

    async def write(self, data: bytes) -> None:
        try:
            await send_all(self.sock, data, WRITE_STALL_S)
        except (OSError, TimeoutError):
            raise ConnectionClosed from None

    async def close(self) -> None:
        """Closes so that the client still reads what was written: unread bytes would turn FIN into RST."""
        try:
            self.sock.shutdown(socket.SHUT_WR)
            async with asyncio.timeout(1.0):
                while await wait_readable(self.sock, 1.0) and self.sock.recv(_READ_BYTES):
                    pass
        except (OSError, TimeoutError):
            pass
        finally:
            self.sock.close()


def _declared_length(headers: dict[str, str]) -> int:
    """Raises Refusal, so that a client who waits for 100 Continue does not send what is not taken."""
    declared = headers.get("content-length", "0")
    length = int(declared) if declared.isascii() and declared.isdigit() else -1
    if length < 0:
        raise Refusal(400, "bad_request", "Content-Length must be a whole number")
    if length > BODY_BYTES_MAX:
        raise _too_large()
    return length


def _too_large() -> Refusal:
    return Refusal(413, "request_too_large", f"The body is over the limit of {BODY_BYTES_MAX} bytes")


def _parse_head(head: bytes) -> Request:
    parsed = _Parsed()
    parser = httptools.HttpRequestParser(parsed)
    try:
        # An offer to change the protocol is not taken up, and the request is answered as any other.
        with suppress(httptools.HttpParserUpgrade):
            parser.feed_data(head)
    except httptools.HttpParserError:
        raise Refusal(400, "bad_request", "The request is not valid HTTP/1.1") from None
    headers: dict[str, str] = {}
    for name, value in parsed.headers:
        if name in headers and name in _ONLY_ONCE:
            raise Refusal(400, "bad_request", f"The header {name} may be given only once")
        headers[name] = value
    if "content-length" in headers and "transfer-encoding" in headers:
        raise Refusal(400, "bad_request", "Content-Length and Transfer-Encoding exclude each other")
    if headers.get("transfer-encoding", "chunked").lower() != "chunked":
        raise Refusal(400, "bad_request", "The only Transfer-Encoding understood is chunked")
    version = parser.get_http_version()
    expectation = headers.get("expect", "").lower() if version == "1.1" else ""
    if expectation not in ("", "100-continue"):
        raise Refusal(417, "expectation_failed", "The only Expect understood is 100-continue")
    return Request(
        expects_continue=bool(expectation),
        method=parser.get_method().decode("ascii"),
        path=parsed.url.decode("latin-1").split("?", 1)[0],
        headers=headers,
        keep_alive=_keeps_alive(version, headers.get("connection", "")),
    )


def _keeps_alive(version: str, connection: str) -> bool:
    options = {option.strip().lower() for option in connection.split(",")}
    return "close" not in options if version == "1.1" else "keep-alive" in options


def head(status: int, headers: dict[str, str]) -> bytes:
    lines = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


def json_response(status: int, body: Any, *, request_id: str, headers: dict[str, str] | None = None) -> bytes:
    payload = orjson.dumps(body)
    all_headers = {
        "content-type": "application/json",
        "content-length": str(len(payload)),
        "cache-control": "no-store",
        "x-content-type-options": "nosniff",
        "x-request-id": request_id,
    } | (headers or {})
    return head(status, all_headers) + payload


_TYPES = {401: "authentication_error", 402: "insufficient_quota", 429: "rate_limit_error"}


def error_response(refusal: Refusal, *, request_id: str, close: bool = False) -> bytes:
    """An error as OpenAI's API words it."""
    kind = _TYPES.get(refusal.status, "invalid_request_error" if refusal.status < 500 else "server_error")
    body = {"error": {"message": refusal.message, "type": kind, "param": refusal.param, "code": refusal.code}}
    headers = {}
    if refusal.status == 401:
        headers["www-authenticate"] = "Bearer"
    if refusal.retry_after_s is not None:
        headers["retry-after"] = str(refusal.retry_after_s)
    if close:
        headers["connection"] = "close"
    return json_response(refusal.status, body, request_id=request_id, headers=headers)
