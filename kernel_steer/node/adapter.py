"""The node's door: vLLM's OpenAI dialect outside, llama.cpp's or TGI's inside. One per node, no Django.

    python -m kernel_steer.node.adapter --engine-url http://127.0.0.1:8101 --port 8201 \
        --served-model gemma-3-270m --tokenizer var/models/gemma-3-270m-q4_k_m.tokenizer.json

docs/nodes.md has the wire format. An engine that dies in mid-answer looks to the outside like a node
that dies: the connection is cut, with no finish reason, no [DONE] and no last chunk. What started
cannot be told from what is whole in any other way.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import re
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import aiohttp
import orjson
from aiohttp import web
from tokenizers import Tokenizer

from kernel_steer.detokenize import TextStream
from kernel_steer.node.child import die_with_parent
from kernel_steer.node.dialect import (
    BadRequest,
    Fields,
    Options,
    error_body,
    fit_max_tokens,
    parse_ids,
    parse_messages,
    parse_options,
    parse_prompt,
    parse_tools,
)
from kernel_steer.node.engine import EngineFailed, EngineRefused, InnerEngine, Wish
from kernel_steer.node.identity import PROBE_CHAT, IdentityUnknown, find_tokenizer, template_id
from kernel_steer.node.llamacpp import LlamaCpp
from kernel_steer.node.models import ModelUnavailable, ensure_demo_model, file_sha256
from kernel_steer.node.revision import revision_of
from kernel_steer.node.shape import AnswerShape, Piece
from kernel_steer.node.tgi import Tgi
from kernel_steer.node.tokenizer_export import ensure_tokenizer

logger = logging.getLogger(__name__)

BODY_BYTES_MAX = 8 << 20
# As in OpenAI's API: a completion without max_tokens is a short one, a chat goes on to the context.
COMPLETION_TOKENS_DEFAULT = 16
_SSE_HEADERS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


class Adapter:
    """The HTTP application of one node."""

    def __init__(
        self,
        *,
        engine_url: str,
        served_model: str,
        tokenizer: Path,
        context: int | None = None,
        revision: str = "",
        engine: str = "llamacpp",
    ) -> None:
        self._kind = engine
        self._running = 0  # answers in work
        self._engine_url = engine_url
        self._model = served_model
        self._tokenizer_path = tokenizer
        self._tokenizer = Tokenizer.from_file(str(tokenizer))
        self._tokenizer_id = file_sha256(tokenizer)
        self._context = context
        self._revision = revision
        self._created = int(time.time())

    def application(self) -> web.Application:
        app = web.Application(client_max_size=BODY_BYTES_MAX, middlewares=[_errors_as_json])
        app.cleanup_ctx.append(self._engine_session)
        app.add_routes(
            [
                web.get("/health", self.health),
                web.get("/metrics", self.metrics),
                web.get("/v1/models", self.models),
                web.get("/tokenizer.json", self.tokenizer_json),
                web.post("/v1/chat/completions", self.chat),
                web.post("/v1/completions", self.completions),
                web.post("/tokenize", self.tokenize),
                web.post("/detokenize", self.detokenize),
            ]
        )
        return app

    async def _engine_session(self, app: web.Application) -> AsyncIterator[None]:
        # A connection per call: closing it is what aborts the work in the engine.
        connector = aiohttp.TCPConnector(force_close=True, limit=0)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=5)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as http:
            self._engine: InnerEngine = self._make_engine(http)
            yield

    def _make_engine(self, http: aiohttp.ClientSession) -> InnerEngine:
        if self._kind == "tgi":
            return Tgi(self._engine_url, http, self._tokenizer)
        return LlamaCpp(self._engine_url, http, byte_token_ids(self._tokenizer_path))

    # --- small questions -----------------------------------------------------------------------------

    async def metrics(self, request: web.Request) -> web.Response:
        """The two of vLLM's gauges that say whether the node may be taken away."""
        return web.Response(text=f"vllm:num_requests_running {self._running}\nvllm:num_requests_waiting 0\n")

    async def health(self, request: web.Request) -> web.Response:
        return web.Response(status=200 if await self._engine.is_healthy() else 503)

    async def models(self, request: web.Request) -> web.Response:
        card = {
            "id": self._model,
            "object": "model",
            "created": self._created,
            "owned_by": self._engine.name,
            "root": self._model,
            "parent": None,
            "max_model_len": await self.context_tokens(),
            "tokenizer_id": self._tokenizer_id,
            "revision": self._revision,
            "template_id": template_id(await self._engine.template(list(PROBE_CHAT))),
            "capabilities": sorted(await self._engine.capabilities()),
        }
        return _json({"object": "list", "data": [card]})

    async def tokenizer_json(self, request: web.Request) -> web.StreamResponse:
        if request.headers.get("If-None-Match") == f'"{self._tokenizer_id}"':
            return web.Response(status=304, headers={"ETag": f'"{self._tokenizer_id}"'})
        body = await asyncio.to_thread(self._tokenizer_path.read_bytes)
        return web.Response(
            body=body, content_type="application/json", headers={"ETag": f'"{self._tokenizer_id}"'}
        )

    async def tokenize(self, request: web.Request) -> web.Response:
        fields = await self._read(request)
        if "messages" in fields.body:
            ids = await self._render(fields)
        else:
            text = fields.body.get("prompt")
            if not isinstance(text, str):
                raise BadRequest("prompt must be a string (or give messages)", "prompt")
            ids = await self._engine.tokenize(text, add_special=fields.flag("add_special_tokens", True))
        return _json({"count": len(ids), "max_model_len": await self.context_tokens(), "tokens": ids})

    async def detokenize(self, request: web.Request) -> web.Response:
        fields = await self._read(request)
        ids = parse_ids(fields.body.get("tokens"), "tokens")
        return _json({"prompt": await self._engine.detokenize(ids)})

    # --- answers -------------------------------------------------------------------------------------

    async def chat(self, request: web.Request) -> web.StreamResponse:
        fields = await self._read(request)
        options = parse_options(fields, chat=True)
        return await self._answer(request, await self._render(fields), options, chat=True)

    async def _render(self, fields: Fields) -> list[int]:
        """Chat messages -> prompt ids, ready for the assistant to speak."""
        tools = parse_tools(fields)
        text = await self._engine.template(parse_messages(fields), tools)
        if any(tool["function"]["name"] not in text for tool in tools):
            raise BadRequest("the chat template of this model knows no tools", "tools")
        return await self._engine.tokenize(text, add_special=True)

    async def completions(self, request: web.Request) -> web.StreamResponse:
        fields = await self._read(request)
        options = parse_options(fields, chat=False)
        if parse_tools(fields):
            raise BadRequest("tools are for chats: a plain prompt describes none", "tools")
        prompt = parse_prompt(fields)
        if isinstance(prompt, str):
            prompt = await self._engine.tokenize(prompt, add_special=True)
        return await self._answer(request, prompt, options, chat=False)

    async def _answer(
        self, request: web.Request, prompt: Sequence[int], options: Options, *, chat: bool
    ) -> web.StreamResponse:
        default = None if chat else COMPLETION_TOKENS_DEFAULT
        max_tokens = fit_max_tokens(len(prompt), options.max_tokens, await self.context_tokens(), default)
        shape = AnswerShape.start(chat=chat, model=self._model, prompt_ids=prompt, options=options)
        async with aclosing(self._pieces(prompt, options, max_tokens)) as pieces:
            if options.stream:
                return await self._stream(request, shape, pieces)
            return _json(shape.whole([piece async for piece in pieces]))

    async def _pieces(
        self, prompt: Sequence[int], options: Options, max_tokens: int
    ) -> AsyncGenerator[Piece, None]:
        """Ids and text of an answer. The text is ours and not the engine's: llama.cpp forgets what it
        kept back for a stop string when the answer ends in another way."""
        text = TextStream(self._tokenizer, options.stop, min_tokens=options.min_tokens)
        wish = Wish(
            prompt,
            max_tokens,
            options.sampling,
            options.min_tokens,
            options.stop_token_ids,
            options.top_logprobs,
            options.guide,
        )
        self._running += 1
        try:
            async with aclosing(self._engine.generate(wish)) as deltas:
                async for delta in deltas:
                    ready = text.push(delta.ids[:-1] if delta.stop_id else delta.ids)
                    if text.stop_string is not None:
                        yield Piece(delta.ids, ready, "stop", text.stop_string, delta.logprobs)
                        return
                    if delta.finish:
                        ready += text.flush()
                    reason = delta.ids[-1] if delta.stop_id else None
                    yield Piece(delta.ids, ready, delta.finish, reason, delta.logprobs)
        finally:
            self._running -= 1

    async def _stream(
        self, request: web.Request, shape: AnswerShape, pieces: AsyncGenerator[Piece, None]
    ) -> web.StreamResponse:
        # The first ids come before the head, so that a request which the engine refuses gets its status.
        piece = await anext(pieces)
        response = web.StreamResponse(headers=_SSE_HEADERS)
        response.enable_chunked_encoding()
        await response.prepare(request)
        completion_tokens = 0
        try:
            if shape.chat:
                await _send(response, shape.role_chunk())
            while True:
                first = completion_tokens == 0
                completion_tokens += len(piece.ids)
                await _send(response, shape.piece_chunk(piece, completion_tokens, first=first))
                if piece.finish:
                    break
                piece = await anext(pieces)
            if shape.options.include_usage:
                await _send(response, shape.usage_chunk(completion_tokens))
            await response.write(b"data: [DONE]\n\n")
            await response.write_eof()
        except EngineFailed as error:
            logger.warning("answer cut after %d tokens: %s", completion_tokens, error)
            _cut(request)
        except ConnectionError:
            pass  # the client left; leaving `pieces` aborts the engine's work
        return response

    # --- helpers -------------------------------------------------------------------------------------

    async def context_tokens(self) -> int:
        """The most tokens of prompt and answer together. Asked once; the engine must be up."""
        if self._context is None:
            self._context = await self._engine.context_tokens()
        return self._context

    async def _read(self, request: web.Request) -> Fields:
        try:
            fields = Fields(orjson.loads(await request.read()))
        except orjson.JSONDecodeError as error:
            raise BadRequest(f"the body is not valid JSON: {error.msg} at byte {error.pos}") from None
        model = fields.body.get("model", self._model)
        if model != self._model:
            raise BadRequest(f"this node serves {self._model} only", "model", status=404)
        return fields


def byte_token_ids(tokenizer: Path) -> list[int] | None:
    """For each byte the id of its token `<0xNN>`; None where the vocabulary has not all of them."""
    vocabulary = orjson.loads(tokenizer.read_bytes())["model"]["vocab"]
    if not isinstance(vocabulary, dict):
        return None
    found = {
        int(match[1], 16): index
        for word, index in vocabulary.items()
        if (match := _BYTE_TOKEN.fullmatch(word))
    }
    return [found[byte] for byte in range(256)] if len(found) == 256 else None


async def _send(response: web.StreamResponse, body: dict[str, Any]) -> None:
    await response.write(b"data: " + orjson.dumps(body) + b"\n\n")


def _cut(request: web.Request) -> None:
    if request.transport is not None:
        request.transport.abort()


def _json(body: dict[str, Any], status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(body), status=status, content_type="application/json")


@web.middleware
async def _errors_as_json(request: web.Request, handler: Any) -> web.StreamResponse:
    try:
        response: web.StreamResponse = await handler(request)
    except BadRequest as error:
        return _json(error_body(error.status, error.message, error.param), error.status)
    except EngineRefused as error:
        return _json(error_body(400, str(error)), 400)
    except EngineFailed as error:
        logger.warning("%s %s: %s", request.method, request.path, error)
        return _json(error_body(503, "the engine of this node does not answer"), 503)
    except web.HTTPException as error:
        return _json(error_body(error.status, error.reason), error.status)
    return response


async def serve(application: web.Application, host: str, port: int) -> web.AppRunner:
    """Starts listening. A client that leaves cancels its handler, and with it the engine's work."""
    runner = web.AppRunner(application, handler_cancellation=True, access_log=None, shutdown_timeout=0)
    await runner.setup()
    await web.TCPSite(runner, host, port).start()
    return runner


async def _main(arguments: argparse.Namespace) -> None:
    adapter = Adapter(
        engine_url=arguments.engine_url,
        served_model=arguments.served_model,
        tokenizer=arguments.tokenizer,
        context=arguments.context,
        revision=arguments.revision,
        engine=arguments.engine,
    )
    await serve(adapter.application(), arguments.host, arguments.port)
    logger.info("%s at http://%s:%d", arguments.served_model, arguments.host, arguments.port)
    await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m kernel_steer.node.adapter")
    parser.add_argument("--engine", choices=["llamacpp", "tgi"], default="llamacpp")
    parser.add_argument("--engine-url", required=True, help="its server, such as http://127.0.0.1:8101")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--served-model", required=True, help="name that requests ask for")
    parser.add_argument(
        "--tokenizer",
        default="",
        help="tokenizer.json, its folder, or a name in the Hugging Face cache; without it the demo model's",
    )
    parser.add_argument("--context", type=int, help="tokens per answer; without it what the engine has")
    parser.add_argument("--revision", default="", help="of the weights; without it the demo model's")
    arguments = parser.parse_args()
    die_with_parent()
    try:
        if arguments.tokenizer:
            arguments.tokenizer = find_tokenizer(arguments.tokenizer)
            model = arguments.tokenizer.parent
        else:
            model = ensure_demo_model()
            arguments.tokenizer = ensure_tokenizer(model)
        arguments.revision = arguments.revision or revision_of(model)
    except (ModelUnavailable, IdentityUnknown) as error:
        sys.exit(f"apex: {error}")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        asyncio.run(_main(arguments))
    except KeyboardInterrupt:
        pass
    except OSError as error:
        sys.exit(f"apex: cannot listen on {arguments.host}:{arguments.port}: {error.strerror}")


if __name__ == "__main__":
    main()
