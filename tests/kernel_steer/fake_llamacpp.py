"""A llama.cpp server in a few lines: it speaks the dialect as measured, faults included.

It "generates" what the test tells it. As the real one, it sends no event for an id that leaves the text
inside a character; only its counter tells.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

EOS = 0
FIRST_BYTE = 300
INSTEAD_OF_EOS = 9


def byte_ids(data: bytes) -> list[int]:
    return [FIRST_BYTE + byte for byte in data]


def spell(token: int) -> bytes:
    """Ids below 300 are words " 1", " 2"; the rest are bytes."""
    if token == EOS:
        return b""
    return b" %d" % token if token < FIRST_BYTE else bytes([token - FIRST_BYTE])


def _is_incomplete(data: bytes) -> bool:
    for back in range(1, min(3, len(data)) + 1):
        byte = data[-back]
        if byte >= 0xC0:
            return back < (2 if byte < 0xE0 else 3 if byte < 0xF0 else 4)
        if byte < 0x80:
            return False
    return False


@dataclass
class FakeLlamaCpp:
    """`script` is the text after any prompt; ids at position p are script[p - len of the first prompt]."""

    script: Sequence[int] = (1, 2, 3, EOS)
    context: int = 100
    healthy: bool = True
    knows_tools: bool = False  # its chat template does
    # Faults, by number of ids sent: cut the connection, end cleanly, report an error, hang.
    cut_after: int | None = None
    end_after: int | None = None
    error_after: int | None = None
    hang_after: int | None = None
    refuse_status: int | None = None
    requests: list[dict[str, Any]] = field(default_factory=list)
    aborted: asyncio.Event = field(default_factory=asyncio.Event)
    _first_prompt: int = 0

    def application(self) -> web.Application:
        app = web.Application()
        app.add_routes(
            [
                web.get("/health", self.health),
                web.get("/props", self.props),
                web.post("/apply-template", self.template),
                web.post("/tokenize", self.tokenize),
                web.post("/detokenize", self.detokenize),
                web.post("/completion", self.completion),
            ]
        )
        return app

    async def health(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"}, status=200 if self.healthy else 503)

    async def props(self, request: web.Request) -> web.Response:
        return web.json_response({"default_generation_settings": {"n_ctx": self.context}})

    async def template(self, request: web.Request) -> web.Response:
        body = await request.json()
        told = "".join(f"{m['role']}:{m['content']};" for m in body["messages"])
        if self.knows_tools:
            told = "".join(f"<{tool['function']['name']}>" for tool in body.get("tools", ())) + told
        return web.json_response({"prompt": told})

    async def tokenize(self, request: web.Request) -> web.Response:
        return web.json_response({"tokens": byte_ids((await request.json())["content"].encode())})

    async def detokenize(self, request: web.Request) -> web.Response:
        data = b"".join(spell(token) for token in (await request.json())["tokens"])
        return web.json_response({"content": data.decode(errors="replace")})

    async def completion(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests.append(body)
        if self.refuse_status:
            return web.json_response({"error": {"message": "no, thanks"}}, status=self.refuse_status)
        if len(self.requests) == 1:
            self._first_prompt = len(body["prompt"])
        start = len(body["prompt"]) - self._first_prompt
        ids = list(self.script[start : start + body["n_predict"]])
        if body.get("ignore_eos"):
            ids = [INSTEAD_OF_EOS if token == EOS else token for token in ids]
        if EOS in ids:
            ids = ids[: ids.index(EOS) + 1]
        finish = "eos" if ids and ids[-1] == EOS else "limit"
        probs = body.get("n_probs", 0)
        if not body["stream"]:
            text = b"".join(spell(token) for token in ids).decode(errors="replace")
            event = _event(text, ids, len(ids), probs)
            return web.json_response(event | {"stop": True, "stop_type": finish})
        return await self._stream(request, ids, finish, probs)

    async def _stream(
        self, request: web.Request, ids: list[int], finish: str, probs: int
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        response.enable_chunked_encoding()
        await response.prepare(request)
        text, sent = b"", 0
        try:
            for count in range(len(ids) + 1):
                if count == self.cut_after:
                    request.transport.abort()
                    return response
                if count == self.end_after:
                    return response
                if count == self.error_after:
                    await _write(response, {"error": {"message": "slot lost"}})
                    return response
                if count == self.hang_after:
                    await asyncio.Event().wait()
                if count == len(ids):
                    break
                text += spell(ids[count])
                if not _is_incomplete(text):
                    new = text[sent:].decode(errors="replace")
                    await _write(response, _event(new, [ids[count]], count + 1, probs))
                    sent = len(text)
            await response.write(b": ping\n\n")
            await _write(response, _event("", [], len(ids)) | {"stop": True, "stop_type": finish})
        except (asyncio.CancelledError, ConnectionError):
            self.aborted.set()
            raise
        return response


def _event(content: str, tokens: list[int], predicted: int, probs: int = 0) -> dict[str, Any]:
    event = {"content": content, "tokens": tokens, "stop": False, "tokens_predicted": predicted}
    if probs and tokens:
        event["completion_probabilities"] = [
            _probability(token) | {"top_logprobs": [_probability(token + more) for more in range(probs)]}
            for token in tokens
        ]
    return event


def _probability(token: int) -> dict[str, Any]:
    data = spell(token)
    word = data.decode(errors="replace")
    return {"id": token, "token": word, "bytes": list(data), "logprob": -token / 10}


async def _write(response: web.StreamResponse, event: dict[str, Any]) -> None:
    await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
