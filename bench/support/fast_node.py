"""A node that costs next to nothing: prepared bytes, no JSON per chunk, so that a bench measures what is in front.

It says the same word until `max_tokens`, as a stream in vLLM's dialect or as one document. With `tick_s` every open
stream gets its next chunk at each tick; without, all of them at once. From ids it continues like any node.
"""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
import uvloop

from tests.kernel_steer.double_model import words
from tests.kernel_steer.engine_double import PROMPT_IDS, TOKENIZER_JSON

WORD = " the"
OTHER_WORD = " cat"  # so that a reader can tell two nodes apart
_STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def run_node(pipe: Any, tick_s: float = 0.0, word: str = WORD) -> None:
    """Target of a `Part`."""

    async def main() -> None:
        node = _Node(word)
        loop = asyncio.get_running_loop()
        server = await loop.create_server(
            lambda: _Connection(node, paced=tick_s > 0), "127.0.0.1", 0, backlog=2048
        )
        pipe.send(server.sockets[0].getsockname()[1])
        due = loop.time()
        while True:
            due += tick_s or 3600
            await asyncio.sleep(due - loop.time())
            node.tick()

    uvloop.run(main())


class _Node:
    def __init__(self, word: str) -> None:
        self.word = word
        self.streams: dict[_Connection, list[bytes]] = {}  # what is still to be said, last piece first

    def tick(self) -> None:
        for connection, left in list(self.streams.items()):
            connection.write(left.pop())
            if not left:
                del self.streams[connection]


class _Connection(asyncio.Protocol):
    def __init__(self, node: _Node, *, paced: bool) -> None:
        self._node = node
        self._paced = paced
        self._buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport

    def connection_lost(self, error: Exception | None) -> None:
        self._node.streams.pop(self, None)

    def write(self, data: bytes) -> None:
        self._transport.write(data)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head, separator, rest = self._buffer.partition(b"\r\n\r\n")
        if not separator:
            return
        if head.startswith(b"GET /tokenizer.json"):
            self._buffer = rest
            self.write(_document(TOKENIZER_JSON))
            return
        length = int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0] or 0)
        if len(rest) < length:
            return
        self._buffer = rest[length:]
        self._answer(head.split(b" ", 2)[1], orjson.loads(rest[:length]))

    def _answer(self, path: bytes, body: dict[str, Any]) -> None:
        chat = path.endswith(b"/chat/completions")
        tokens = body.get("max_tokens") or body.get("max_completion_tokens") or 20
        prompt = PROMPT_IDS if chat else body["prompt"]
        if not body.get("stream"):
            self.write(_whole(self._node.word, tokens))
            return
        usage = bool(body.get("stream_options"))
        pieces = _pieces(self._node.word, chat, tokens, prompt, with_usage=usage)
        if self._paced:
            self.write(_STREAM_HEAD + pieces[0] + pieces[1])
            self._node.streams[self] = pieces[:1:-1]
        else:
            self.write(_STREAM_HEAD + b"".join(pieces))


def _pieces(spoken: str, chat: bool, tokens: int, prompt: list[int], *, with_usage: bool) -> list[bytes]:
    """The events of a stream: what comes first, a token each, and the end (with the last of them)."""
    said = {"delta": {"content": spoken}} if chat else {"text": spoken}
    ids = words(spoken.replace(" ", "▁"))
    word = _event(chat, [{"index": 0, "token_ids": ids, **said, "logprobs": None, "finish_reason": None}])
    last = _event(chat, [{"index": 0, "token_ids": ids, **said, "logprobs": None, "finish_reason": "length"}])
    if chat:
        role = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None}
        first = _event(chat, [role | {"finish_reason": None}], prompt_token_ids=prompt)
    else:
        first = _event(
            chat,
            [{"index": 0, "prompt_token_ids": prompt, "token_ids": [], "text": "", "finish_reason": None}],
        )
    usage = _event(chat, [], usage=_usage(len(prompt), tokens)) if with_usage else b""
    end = last + usage + _framed(b"data: [DONE]\n\n") + b"0\r\n\r\n"
    return [first, *([word] * (tokens - 1)), end]


def _event(chat: bool, choices: list[dict[str, Any]], **more: Any) -> bytes:
    kind = "chat.completion.chunk" if chat else "text_completion"
    body = {"id": "chatcmpl-1", "object": kind, "created": 1764550000, "model": "double", "choices": choices}
    return _framed(b"data: " + orjson.dumps(body | more) + b"\n\n")


def _framed(payload: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(payload), payload)


def _whole(word: str, tokens: int) -> bytes:
    message = {"role": "assistant", "content": word * tokens}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "length"}
    body = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1764550000, "model": "double"}
    return _document(orjson.dumps(body | {"choices": [choice], "usage": _usage(len(PROMPT_IDS), tokens)}))


def _usage(prompt: int, completion: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def _document(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (
        len(body),
        body,
    )
