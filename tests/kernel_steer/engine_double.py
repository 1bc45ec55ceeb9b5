"""A model server without a model: vLLM's dialect, a script instead of weights, and every way to end.

Its "model" continues a fixed script of token ids, so a continuation from ids can be compared with an
uninterrupted answer id by id. The tokenizer is a real one (library `tokenizers`) with byte tokens, so
characters do span tokens.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models

EOS, ANSWER = "<eos>", "<answer>"
WORDS = ["▁the", "▁cat", "▁sat", ",", "▁on", '▁"mat"', "\\", "\n", "▁über", "▁日本"]


def make_tokenizer() -> Tokenizer:
    vocabulary = {EOS: 0, ANSWER: 1}
    for byte in range(256):
        vocabulary[f"<0x{byte:02X}>"] = len(vocabulary)
    for word in WORDS:
        vocabulary[word] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens([AddedToken(EOS, special=True), AddedToken(ANSWER, special=True)])
    return tokenizer


TOKENIZER = make_tokenizer()
TOKENIZER_JSON = TOKENIZER.to_str().encode()
TOKENIZER_ID = hashlib.sha256(TOKENIZER_JSON).hexdigest()


def byte_tokens(text: str) -> list[int]:
    return [2 + byte for byte in text.encode()]


def words(*names: str) -> list[int]:
    return [TOKENIZER.token_to_id(name) for name in names]


# Text with everything that breaks when two texts are joined: quotes, backslash, a new line, an emoji
# and a Chinese character of several tokens, words with non-ASCII letters.
SCRIPT = [
    *words("▁the"), *byte_tokens("😀"), *words("▁\"mat\"", "\\", "\n", "▁über"), *byte_tokens("漢"), *words(","),
]  # fmt: skip
SCRIPT_TEXT = TOKENIZER.decode(SCRIPT, skip_special_tokens=True)
PROMPT_IDS = [*byte_tokens("hi"), 1]


@dataclass
class Fault:
    """How the next answers end. Byte positions are in the body, chunk framing included."""

    cut_at_byte: int | None = None
    how: str = "eof"  # eof, reset, stall
    error_event_after: int | None = None  # tokens
    abort_after: int | None = None  # tokens: finish_reason "abort", then [DONE], as vLLM on SIGTERM
    status: int | None = None
    refuse: dict[str, Any] | None = None  # a 400 with this error
    pause_after: int | None = None  # tokens; goes on when `resume` is set
    silent_after: int | None = None  # tokens; says nothing more until the client hangs up


@dataclass
class EngineDouble:
    """One node. `script` is what it says; `requests` is what it was asked."""

    name: str = "node"
    script: list[int] = field(default_factory=lambda: list(SCRIPT))
    finish_reason: str = "stop"
    fault: Fault = field(default_factory=Fault)
    requests: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    resume: asyncio.Event = field(default_factory=asyncio.Event)
    prompt_ids: list[int] = field(default_factory=lambda: list(PROMPT_IDS))  # what messages become
    disconnects: int = 0
    paused: bool = False
    port: int = 0
    ascii_json: bool = True
    _connections: set[asyncio.StreamWriter] = field(default_factory=set)
    _server: asyncio.Server | None = None

    @asynccontextmanager
    async def running(self) -> AsyncIterator[EngineDouble]:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            await self.kill()

    async def kill(self) -> None:
        """As kill -9: no new connections, open ones reset."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for writer in list(self._connections):
            _reset(writer)
        self.resume.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections.add(writer)
        try:
            await self._answer(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            self.disconnects += 1
        except asyncio.CancelledError:
            pass  # the test is over
        finally:
            self._connections.discard(writer)
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        path = head.split(" ", 2)[1]
        if path == "/tokenizer.json":
            _write_document(writer, 200, TOKENIZER_JSON)
            await writer.drain()
            return
        length = next(
            int(line.split(":")[1])
            for line in head.split("\r\n")
            if line.lower().startswith("content-length")
        )
        body = json.loads(await reader.readexactly(length))
        self.requests.append((path, body))
        fault = self.fault
        if fault.refuse is not None or fault.status is not None:
            _write_document(
                writer,
                fault.status or 400,
                json.dumps({"error": fault.refuse or {"message": "broken"}}).encode(),
            )
            await writer.drain()
            return
        writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        if fault.cut_at_byte is not None:
            whole = b"".join([chunk for _, chunk in self.body(path, body)])
            writer.write(whole[: fault.cut_at_byte])
            await writer.drain()
            await self._end(writer, fault.how)
            return
        for told, chunk in self.body(path, body):
            if fault.silent_after == told:
                await writer.drain()
                await reader.read(1)
                self.disconnects += 1
                return
            if fault.pause_after is not None and told == fault.pause_after and not self.resume.is_set():
                await writer.drain()
                self.paused = True
                # Whoever hangs up while the model thinks is noticed, as a real server does.
                hung_up = asyncio.ensure_future(reader.read(1))
                go_on = asyncio.ensure_future(self.resume.wait())
                await asyncio.wait([hung_up, go_on], return_when=asyncio.FIRST_COMPLETED)
                if hung_up.done():
                    go_on.cancel()
                    self.disconnects += 1
                    return
                hung_up.cancel()
            writer.write(chunk)
            await writer.drain()
        await writer.drain()

    async def _end(self, writer: asyncio.StreamWriter, how: str) -> None:
        if how == "reset":
            _reset(writer)
        elif how == "stall":
            await self.resume.wait()

    def body(self, path: str, body: dict[str, Any]) -> list[tuple[int, bytes]]:
        """The whole answer as (tokens told before, chunk); what a fault of the double leaves of it."""
        chat = path.endswith("/chat/completions")
        prompt = self.prompt_ids if chat else body["prompt"]
        done = len(prompt) - 1 - max(i for i, token in enumerate(prompt) if token == 1)
        limit = body.get("max_tokens") or body.get("max_completion_tokens") or 10_000
        left = self.script[done:][:limit]
        reason = self.finish_reason if len(left) < limit or len(self.script) - done <= limit else "length"
        if len(self.script) - done > limit:
            reason = "length"
        out: list[tuple[int, bytes]] = []
        made = f"chatcmpl-{self.name}" if chat else f"cmpl-{self.name}"
        base = {
            "id": made,
            "object": "chat.completion.chunk" if chat else "text_completion",
            "created": 1764550000,
            "model": body["model"],
        }

        def say(choices: list[dict[str, Any]], **extra: Any) -> None:
            data = json.dumps(base | {"choices": choices} | extra, ensure_ascii=self.ascii_json).encode()
            payload = b"data: " + data + b"\n\n"
            out.append((told, b"%x\r\n%b\r\n" % (len(payload), payload)))

        told = 0
        if chat:
            say(
                [
                    {
                        "index": 0,
                        "delta": {"role": "assistant", "content": ""},
                        "logprobs": None,
                        "finish_reason": None,
                    }
                ],
                prompt_token_ids=prompt,
            )
        shown = TOKENIZER.decode(self.script[:done], skip_special_tokens=True).rstrip("\ufffd")
        begun_at = len(shown)
        for position, token in enumerate(left):
            if self.fault.error_event_after == told:
                payload = b'data: {"error": {"message": "EngineCore died", "code": 500}}\n\ndata: [DONE]\n\n'
                out.append((told, b"%x\r\n%b\r\n0\r\n\r\n" % (len(payload), payload)))
                return out
            if self.fault.abort_after == told:
                reason = "abort"
                break
            text = TOKENIZER.decode(self.script[: done + position + 1], skip_special_tokens=True).rstrip(
                "\ufffd"
            )
            # A server that continues in the middle of a character shows the whole character: the trap.
            # It looks for stop strings in what it generated itself, and holds back what may become one.
            text, stopped = _cut_at_stop(text, begun_at, body.get("stop") or [])
            delta, shown = text[len(shown) :], max(text, shown, key=len)
            last = stopped or position + 1 == len(left)
            reason = "stop" if stopped else reason
            choice: dict[str, Any] = {"index": 0, "token_ids": [token]}
            choice |= {"delta": {"content": delta}} if chat else {"text": delta}
            choice |= {"logprobs": None, "finish_reason": reason if last else None}
            if not chat and position == 0:
                choice["prompt_token_ids"] = prompt
            say([choice])
            told += 1
            if stopped:
                break
        if not left or reason == "abort":
            say([{"index": 0, "delta": {}, "text": "", "logprobs": None, "finish_reason": reason}])
        if (body.get("stream_options") or {}).get("include_usage"):
            say(
                [],
                usage={
                    "prompt_tokens": len(prompt),
                    "completion_tokens": len(left),
                    "total_tokens": len(prompt) + len(left),
                },
            )
        payload = b"data: [DONE]\n\n"
        out.append((told, b"%x\r\n%b\r\n" % (len(payload), payload)))
        out.append((told, b"0\r\n\r\n"))
        return out


def _cut_at_stop(text: str, begun_at: int, stops: list[str]) -> tuple[str, bool]:
    """The text that may be shown, and whether a stop string ended it."""
    generated = text[begun_at:]
    found = [generated.index(stop) for stop in stops if stop in generated]
    if found:
        return text[: begun_at + min(found)], True
    for length in range(max((len(stop) for stop in stops), default=1) - 1, 0, -1):
        if any(generated.endswith(stop[:length]) for stop in stops if len(stop) > length):
            return text[: len(text) - length], False
    return text, False


def _write_document(writer: asyncio.StreamWriter, status: int, data: bytes) -> None:
    writer.write(
        b"HTTP/1.1 %d X\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % (status, len(data))
        + data
    )


def _reset(writer: asyncio.StreamWriter) -> None:
    sock = writer.get_extra_info("socket")
    if sock is not None and writer.transport is not None:
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        except OSError:
            return
        writer.transport.abort()
