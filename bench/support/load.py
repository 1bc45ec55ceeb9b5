"""A load generator that is not the bottleneck: raw connections, one request after the other on each."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

from bench.support.fast_node import WORD

_FIRST_WORD = WORD.encode()
_STREAM_END = b"0\r\n\r\n"


def request_bytes(key: str, *, stream: bool, tokens: int, model: str = "double") -> bytes:
    message = {"role": "user", "content": "hi"}
    body = json.dumps(
        {"model": model, "messages": [message], "stream": stream, "max_tokens": tokens}
    ).encode()
    return (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: bench\r\nAuthorization: Bearer %b\r\n"
        b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (key.encode(), len(body), body)
    )


class Caller:
    """One keep-alive connection."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, request: bytes) -> float:
        """Until the last byte of the answer; returns seconds to the first word of it."""
        if self._streams is None:
            self._streams = await asyncio.open_connection("127.0.0.1", self._port, limit=1 << 20)
        reader, writer = self._streams
        started, first = time.perf_counter(), 0.0
        writer.write(request)
        got = b""
        while True:
            data = await reader.read(65536)
            if not data:
                raise ConnectionError(f"the connection ended after {got[-300:]!r}")
            got += data
            if not first and _FIRST_WORD in got:
                first = time.perf_counter() - started
            if _is_whole(got):
                break
        if not got.startswith(b"HTTP/1.1 200") or not first:
            raise ConnectionError(f"not an answer: {got[:500]!r}")
        return first

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()


def _is_whole(got: bytes) -> bool:
    if got.endswith(_STREAM_END):
        return True
    head, separator, body = got.partition(b"\r\n\r\n")
    length = head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0]
    return bool(separator and length) and len(body) >= int(length)


async def rate(port: int, request: bytes, *, callers: int, seconds: float) -> dict[str, Any]:
    """Closed loop: as many answers as `callers` get one after the other in that time."""
    done, firsts = 0, []
    until = time.perf_counter() + seconds

    async def call() -> None:
        nonlocal done
        caller = Caller(port)
        while time.perf_counter() < until:
            firsts.append(await caller.ask(request))
            done += 1
        caller.close()

    started = time.perf_counter()
    await asyncio.gather(*(call() for _ in range(callers)))
    return {"per_s": done / (time.perf_counter() - started), "first_s": firsts}
