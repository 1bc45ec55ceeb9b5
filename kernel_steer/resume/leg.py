"""Opens a leg: one request to one node, up to the head of its answer."""

from __future__ import annotations

import asyncio
import socket
import time
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from enum import StrEnum
from typing import Any

import httptools
import orjson

from kernel_steer.admission import Node
from kernel_steer.engine.wake import ClientWatch, send_all, wait_readable

CONNECT_TIMEOUT_S = 2.0
HEAD_BYTES_MAX = 32768
ERROR_BYTES_MAX = 65536
RETRY_AFTER_MAX_S = 300.0
_READ_BYTES = 32768


class LegFailed(Exception):
    """The node could not take the request; another one may. The message goes to the log.

    `unreachable`: there is nobody at its address. `blameless`: it is well, such as one that has no room now;
    `retry_after_s` is when it may be asked again, where it says so. `misconfigured`: it does not take what staff
    have set for it, so nobody's request will do. `status` is the HTTP status, where there was one.
    """

    def __init__(
        self,
        message: str,
        *,
        unreachable: bool = False,
        blameless: bool = False,
        misconfigured: bool = False,
        retry_after_s: float | None = None,
        status: int | None = None,
    ) -> None:
        super().__init__(message)
        self.unreachable, self.blameless, self.misconfigured = unreachable, blameless, misconfigured
        self.retry_after_s, self.status = retry_after_s, status


class LegRefused(Exception):
    """The node says that the request itself is wrong (4xx): no other node would say otherwise."""

    def __init__(self, status: int, message: str, code: str | None, param: str | None) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param


class ClientLeft(Exception):
    """The client hung up while a node was being asked."""


class Mode(StrEnum):
    """What a leg was asked for."""

    FRESH = "fresh"  # the answer, from its beginning
    APPEND = "append"  # the rest, after prompt and emitted ids
    REPLAY = "replay"  # the same answer again; what was said already is swallowed
    TEXT = "text"  # the rest, after the text so far: for servers without ids


@dataclass(slots=True)
class Leg:
    """A node that has begun to answer: its socket, and the body bytes that came with the head."""

    number: int
    node: Node
    sock: socket.socket
    rest: bytes
    mode: Mode = Mode.FRESH


class _Head:
    def __init__(self) -> None:
        self.headers: dict[str, str] = {}

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")


async def open_leg(
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
    """Sends the request and reads the head. `timeout_s` bounds the wait for the head (prefill included).

    Raises LegFailed, LegRefused or ClientLeft; then nothing stays open.
    """
    sock = await _connect(node)
    try:
        await _send_request(sock, node, path, body, request_id)
        head, rest = await _read_head(sock, timeout_s, watch)
        status, headers = parse_head(head)
        if status != 200:
            await _raise_for(status, headers, rest, sock)
        if headers.get("transfer-encoding", "").lower() != "chunked":
            raise LegFailed("the answer is not chunked")
    except BaseException:
        sock.close()
        raise
    return Leg(number, node, sock, rest, mode)


async def _connect(node: Node) -> socket.socket:
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            addresses = await loop.getaddrinfo(node.host, node.port, type=socket.SOCK_STREAM)
            family, kind, protocol, _, address = addresses[0]
            sock = socket.socket(family, kind, protocol)
            try:
                sock.setblocking(False)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                await loop.sock_connect(sock, address)
            except BaseException:
                sock.close()
                raise
            return sock
    except (OSError, TimeoutError) as error:
        raise LegFailed(f"cannot connect: {error or 'timed out'}", unreachable=True) from error


async def _send_request(
    sock: socket.socket, node: Node, path: str, body: dict[str, Any], request_id: str
) -> None:
    payload = orjson.dumps(body)
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {node.host}:{node.port}\r\nContent-Type: application/json\r\n"
        f"Accept: text/event-stream\r\nX-Request-ID: {request_id}\r\nContent-Length: {len(payload)}\r\n\r\n"
    )
    try:
        await send_all(sock, head.encode("ascii") + payload, CONNECT_TIMEOUT_S)
    except (OSError, TimeoutError) as error:
        raise LegFailed("the node does not take the request") from error


async def _read_head(sock: socket.socket, timeout_s: float, watch: ClientWatch | None) -> tuple[bytes, bytes]:
    buffer = b""
    while b"\r\n\r\n" not in buffer:
        buffer += await _read(sock, timeout_s, watch)
        if len(buffer) > HEAD_BYTES_MAX:
            raise LegFailed("a head without end")
    head, rest = buffer.split(b"\r\n\r\n", 1)
    return head + b"\r\n\r\n", rest


async def _read(sock: socket.socket, timeout_s: float, watch: ClientWatch | None) -> bytes:
    if not await wait_readable(sock, timeout_s, watch):
        if watch is not None and watch.gone:
            raise ClientLeft
        raise LegFailed("no answer in time")
    try:
        data = sock.recv(_READ_BYTES)
    except OSError as error:
        raise LegFailed(f"connection lost: {error.strerror}") from error
    if not data:
        raise LegFailed("connection closed before the answer")
    return data


def parse_head(head: bytes) -> tuple[int, dict[str, str]]:
    """Status and headers, their names in small letters. Raises LegFailed."""
    protocol = _Head()
    parser = httptools.HttpResponseParser(protocol)
    try:
        parser.feed_data(head)
    except httptools.HttpParserError as error:
        raise LegFailed("a malformed head") from error
    return parser.get_status_code(), protocol.headers


async def _raise_for(status: int, headers: dict[str, str], rest: bytes, sock: socket.socket) -> None:
    """A node that is at its limit or broken is another matter than a request that is wrong."""
    if status >= 500 or status in (408, 429) or status < 400:
        raise busy_or_broken(status, headers)
    try:
        wanted = min(int(headers.get("content-length", "0")), ERROR_BYTES_MAX)
        while len(rest) < wanted:
            rest += await _read(sock, CONNECT_TIMEOUT_S, None)
        rest = rest[:wanted]
    except (LegFailed, ValueError):
        rest = b""
    raise refused(status, rest)


def busy_or_broken(status: int, headers: dict[str, str]) -> LegFailed:
    """Of a status that says nothing about the request."""
    return LegFailed(
        f"the node answered {status}",
        blameless=status in (408, 429),
        retry_after_s=_retry_after_s(headers.get("retry-after", "")) if status in (429, 503) else None,
        status=status,
    )


def refused(status: int, body: bytes) -> LegRefused:
    """What the body of a 4xx says, in OpenAI's format or not."""
    try:
        error = orjson.loads(body)
        error = error.get("error", error)
        message, code, param = str(error["message"]), error.get("code"), error.get("param")
    except (ValueError, KeyError, TypeError, AttributeError):
        message, code, param = "the model server refused the request", None, None
    return LegRefused(
        status, message, code if isinstance(code, str) else None, param if isinstance(param, str) else None
    )


def _retry_after_s(value: str) -> float | None:
    """Seconds or an HTTP date (RFC 9110, 10.2.3); nobody is left alone for longer than RETRY_AFTER_MAX_S."""
    try:
        seconds = (
            float(value)
            if value.strip().isdigit()
            else parsedate_to_datetime(value).timestamp() - time.time()
        )
    except (ValueError, TypeError, OverflowError):
        return None
    return min(max(seconds, 0.0), RETRY_AFTER_MAX_S)
