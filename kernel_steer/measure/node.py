"""A node that costs next to nothing: prepared chunks, so that the gateway is what is measured."""

from __future__ import annotations

import asyncio
from multiprocessing.connection import Connection

import orjson
import uvloop

from kernel_steer.resume.chunked import LAST_CHUNK, encode_chunk
from kernel_steer.resume.joint import DONE_EVENT, encode_event

MODEL = "bench"
LIVE = "live"  # a question whose answer goes on until the client leaves
TICK_S = 0.5
_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
_PROMPT_IDS = [1, 2, 3]


def event(position: int, *, last: bool = False) -> bytes:
    """The chunk of token `position`; its id is the position, so a reader sees what is missing or doubled."""
    body = {"id": "bench", "object": "chat.completion.chunk", "created": 0, "model": MODEL}
    choice = {
        "index": 0,
        "token_ids": [position],
        "delta": {"content": f" {position}"},
        "logprobs": None,
        "finish_reason": "length" if last else None,
    }
    return encode_chunk(encode_event(body | {"choices": [choice]}))


def role_chunk() -> bytes:
    body = {"id": "bench", "object": "chat.completion.chunk", "created": 0, "model": MODEL}
    choice = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
    return encode_chunk(encode_event(body | {"prompt_token_ids": _PROMPT_IDS, "choices": [choice]}))


_SHORT = _HEAD + role_chunk() + event(0, last=True) + encode_chunk(DONE_EVENT) + LAST_CHUNK


def run_node(pipe: Connection, tick_s: float = TICK_S) -> None:
    """Target of a process; sends its port and serves until it is killed. A live answer goes on every `tick_s`."""
    uvloop.run(_serve(pipe, tick_s))


async def _serve(pipe: Connection, tick_s: float) -> None:
    live: dict[asyncio.StreamWriter, int] = {}

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
            body = orjson.loads(await reader.readexactly(length))
            if body["messages"][0]["content"] != LIVE:
                writer.write(_SHORT)
                await writer.drain()
                writer.close()
                return
            writer.write(_HEAD + role_chunk() + event(0))
            live[writer] = 1
            await reader.read(1)  # until the gateway hangs up
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            live.pop(writer, None)
            writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0, backlog=4096)
    pipe.send(server.sockets[0].getsockname()[1])
    while server.is_serving():
        await asyncio.sleep(tick_s)
        for count, (writer, position) in enumerate(list(live.items())):
            writer.write(event(position))
            live[writer] = position + 1
            if count % 50 == 49:
                await asyncio.sleep(0)  # probes must not wait for a thousand writes
