"""A model server without a model: vLLM's dialect, a script instead of weights, and every way to end.

Its "model" (double_model.py) continues a fixed script of token ids, so a continuation from ids can be compared
with an uninterrupted answer id by id. The tokenizer is a real one (library `tokenizers`) with byte tokens, so
characters do span tokens.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
import socket
import struct
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from kernel_steer.admission import Resume
from tests.kernel_steer.double_model import (
    SCRIPT,
    TOKENIZER,
    Model,
    Parsed,
    byte_tokens,
    chat_logprobs,
    completion_logprobs,
    decode,
    difference,
    parse,
    shown_text,
)

TOKENIZER_JSON = TOKENIZER.to_str().encode()
TOKENIZER_ID = hashlib.sha256(TOKENIZER_JSON).hexdigest()
SCRIPT_TEXT = decode(SCRIPT)
PROMPT_TEXT = "hi"
PROMPT_IDS = [*byte_tokens(PROMPT_TEXT), 1]


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
    repeat_after: int | None = None  # tokens: the last one comes again, with the usage it had


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
    resumes: Resume = Resume.IDS
    tokens_per_event: int = 1
    ends_at: int | None = None  # position from which it would rather end; see Model
    chance: random.Random = field(default_factory=lambda: random.Random(4))
    prefill_s: float = 0.0
    reasoning: bool = False  # it was started with a reasoning parser
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
        if self.resumes is not Resume.IDS and "return_token_ids" in body:
            fault = Fault(refuse={"message": "unknown parameter", "param": "return_token_ids"})
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
        await writer.drain()
        await asyncio.sleep(self.prefill_s)
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
        return list(_Answer(self, path.endswith("/chat/completions"), body).chunks())


class _Answer:
    """One answer in the dialect of the route it was asked on."""

    def __init__(self, double: EngineDouble, chat: bool, body: dict[str, Any]) -> None:
        self._double = double
        self._chat = chat
        self._body = body
        self._prompt, self._prior = self._read_prompt()
        model = Model(double.script, double.finish_reason, double.ends_at, double.chance)
        self._said = model.generate(self._prior, body)
        stop = body.get("stop") or []
        self._stops = [stop] if isinstance(stop, str) else stop
        self._numbered = double.resumes is Resume.IDS
        self._told = 0
        self._options = body.get("stream_options") or {}
        self._call_ids = [f"call-{double.name}-{uuid.uuid4().hex[:6]}" for _ in range(4)]
        self._base = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{double.name}",
            "object": "chat.completion.chunk" if chat else "text_completion",
            "created": 1764550000,
            "model": body["model"],
        }

    def _read_prompt(self) -> tuple[list[int], list[int]]:
        """The prompt's ids, and those of them that are the answer so far."""
        prompt = self._double.prompt_ids if self._chat else self._body["prompt"]
        begun = ""
        if self._chat and self._body.get("continue_final_message"):
            assert self._body["add_generation_prompt"] is False
            begun = self._body["messages"][-1]["content"]
        if isinstance(prompt, str):
            begun = prompt.removeprefix(PROMPT_TEXT)
            prompt = list(self._double.prompt_ids)
        if begun:
            prompt = [*prompt, *self._tokens_of(begun)]
        return prompt, prompt[max(i for i, token in enumerate(prompt) if token == 1) + 1 :]

    def _tokens_of(self, text: str) -> list[int]:
        script = self._double.script
        return next(script[:n] for n in range(len(script) + 1) if decode(script[:n]).startswith(text))

    def chunks(self) -> Iterator[tuple[int, bytes]]:
        fault, reason = self._double.fault, self._said.reason
        if self._chat:
            role = {"index": 0, "delta": {"role": "assistant", "content": ""}, **self._ends()}
            yield self._say([role], **({"prompt_token_ids": self._prompt} if self._numbered else {}))
        begun_at = len(decode(self._prior).rstrip("\ufffd"))
        shown, parsed, waiting = decode(self._prior).rstrip("\ufffd"), Parsed(), list[int]()
        for position, token in enumerate(self._said.ids):
            if fault.error_event_after == self._told:
                yield self._died()
                return
            if fault.abort_after == self._told:
                reason = "abort"
                break
            waiting.append(token)
            # A server that continues in the middle of a character shows the whole character: the trap.
            whole = decode([*self._prior, *self._said.ids[: position + 1]]).rstrip("\ufffd")
            if token in (self._body.get("stop_token_ids") or []):
                whole = shown
            text, stopped = shown_text(whole, begun_at, self._stops)
            last = stopped or position + 1 == len(self._said.ids)
            if last and not stopped and whole != text:
                text = whole
            reason = "stop" if stopped else reason
            if len(waiting) < self._double.tokens_per_event and not last:
                continue
            delta, shown = text[len(shown) :], max(text, shown, key=len)
            choice: dict[str, Any] = {"index": 0}
            if self._numbered:
                choice["token_ids"] = list(waiting)
            if self._chat:
                now = self._parse(text[begun_at:], ended=last)
                choice["delta"] = difference(parsed, now, self._call_ids) or {"content": ""}
                parsed = now
                if last and reason == "stop" and now.calls:
                    reason = "tool_calls"
            else:
                choice["text"] = delta
            choice |= self._ends(waiting, position, reason if last else None)
            if not self._chat and self._told == 0 and self._numbered:
                choice["prompt_token_ids"] = self._prompt
            yield self._say([choice], **self._running_usage(len(waiting)))
            self._told += len(waiting)
            if fault.repeat_after == self._told:
                yield self._say([choice], **self._running_usage(0))
            waiting.clear()
            if stopped:
                break
        if not self._said.ids or reason == "abort":
            yield self._say([{"index": 0, "delta": {}, "text": "", **self._ends(reason=reason)}])
        if self._options.get("include_usage"):
            yield self._say([], usage=self._usage(self._told))
        yield self._told, _chunk(b"data: [DONE]\n\n")
        yield self._told, b"0\r\n\r\n"

    def _parse(self, text: str, *, ended: bool) -> Parsed:
        tools = bool(self._body.get("tools")) and self._body.get("tool_choice") != "none"
        return parse(text, reasoning=self._double.reasoning, tools=tools, ended=ended)

    def _ends(
        self, ids: list[int] | None = None, position: int = 0, reason: str | None = None
    ) -> dict[str, Any]:
        logprobs = None
        if ids and self._chat and self._body.get("logprobs"):
            logprobs = chat_logprobs(ids, self._body.get("top_logprobs") or 0)
        elif ids and not self._chat and self._body.get("logprobs") is not None:
            first = position + 1 - len(ids)
            before = [decode(self._said.ids[:n]).rstrip("\ufffd") for n in range(first, position + 1)]
            logprobs = completion_logprobs(ids, self._body["logprobs"], [len(text) for text in before])
        return {"logprobs": logprobs, "finish_reason": reason}

    def _running_usage(self, more: int) -> dict[str, Any]:
        if not self._options.get("continuous_usage_stats"):
            return {}
        return {"usage": self._usage(self._told + more)}

    def _usage(self, completion: int) -> dict[str, int]:
        prompt = len(self._prompt)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        }

    def _say(self, choices: list[dict[str, Any]], **extra: Any) -> tuple[int, bytes]:
        document = self._base | {"choices": choices} | extra
        data = json.dumps(document, ensure_ascii=self._double.ascii_json).encode()
        return self._told, _chunk(b"data: " + data + b"\n\n")

    def _died(self) -> tuple[int, bytes]:
        last_words = b'data: {"error": {"message": "EngineCore died", "code": 500}}\n\ndata: [DONE]\n\n'
        return self._told, _chunk(last_words) + b"0\r\n\r\n"


def _chunk(payload: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(payload), payload)


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
