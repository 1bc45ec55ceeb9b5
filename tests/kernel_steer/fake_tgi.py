"""A text-generation-inference server in a few lines, with the wire format of versions 2 and 3.

Text in, ids out; no space after `data:`, no [DONE]; the end is an event with `details`, or none at all.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from tests.kernel_steer.double_model import ANSWER, EOS, SCRIPT, TOKENIZER

EOS_ID = TOKENIZER.token_to_id(EOS)


def spell(ids: Sequence[int]) -> str:
    return TOKENIZER.decode(list(ids), skip_special_tokens=True).rstrip("\ufffd")


@dataclass
class FakeTgi:
    """Says `script` after the marker of an answer, from wherever the text has got to."""

    script: Sequence[int] = (*SCRIPT, EOS_ID)
    # Faults, by number of tokens sent.
    cut_after: int | None = None
    end_after: int | None = None
    error_after: int | None = None
    overloaded: bool = False
    requests: list[dict[str, Any]] = field(default_factory=list)
    aborted: asyncio.Event = field(default_factory=asyncio.Event)

    def application(self) -> web.Application:
        app = web.Application()
        app.add_routes(
            [
                web.get("/health", self.health),
                web.get("/info", self.info),
                web.post("/chat_tokenize", self.chat_tokenize),
                web.post("/generate_stream", self.generate_stream),
            ]
        )
        return app

    async def health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def info(self, request: web.Request) -> web.Response:
        return web.json_response({"model_id": "org/model", "model_sha": "abc", "max_total_tokens": 4096})

    async def chat_tokenize(self, request: web.Request) -> web.Response:
        text = "".join(f"{m['role']}:{m['content']};" for m in (await request.json())["messages"]) + ANSWER
        return web.json_response({"tokenize_response": [], "templated_text": text})

    async def generate_stream(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests.append(body)
        if self.overloaded:
            return web.json_response({"error": "Model is overloaded", "error_type": "overloaded"}, status=429)
        said = body["inputs"].rpartition(ANSWER)[2]
        begun = max(k for k in range(len(self.script) + 1) if spell(self.script[:k]) == said)
        while begun and spell(self.script[: begun - 1]) == said:
            begun -= 1  # text does not tell the first ids of a character that was begun
        ids = list(self.script[begun:])[: body["parameters"]["max_new_tokens"]]
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        response.enable_chunked_encoding()
        await response.prepare(request)
        try:
            await self._say(request, response, ids, body["parameters"].get("top_n_tokens", 0))
        except (asyncio.CancelledError, ConnectionError):
            self.aborted.set()
            raise
        return response

    async def _say(
        self, request: web.Request, response: web.StreamResponse, ids: list[int], top: int
    ) -> None:
        for count in range(len(ids) + 1):
            if count == self.cut_after:
                request.transport.abort()
                return
            if count == self.end_after:
                return
            if count == self.error_after:
                failure = {"error": "Request failed during generation", "error_type": "generation"}
                await _write(response, failure)
                return
            if count == len(ids):
                return
            event: dict[str, Any] = {"index": count + 1, "token": _token(ids[count])}
            if top:
                event["top_tokens"] = [_token(ids[count]), _token(3)][:top]
            last = count + 1 == len(ids)
            event |= {"generated_text": spell(ids) if last else None, "details": None}
            if last:
                reason = "eos_token" if ids[-1] == EOS_ID else "length"
                event["details"] = {"finish_reason": reason, "generated_tokens": len(ids), "seed": None}
            await _write(response, event)


def _token(token: int) -> dict[str, Any]:
    text = TOKENIZER.decode([token], skip_special_tokens=False)
    return {"id": token, "text": text, "logprob": -token / 10, "special": token == EOS_ID}


async def _write(response: web.StreamResponse, event: dict[str, Any]) -> None:
    await response.write(b"data:" + json.dumps(event).encode() + b"\n\n")
