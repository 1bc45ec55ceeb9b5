"""A client of llama.cpp's own HTTP dialect, with every generated id accounted for."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import aiohttp
import orjson

_FINISH = {"eos": "stop", "limit": "length"}
_LAST_EVENT_FIELDS = ["content", "tokens", "stop", "stop_type", "tokens_predicted"]
_REPLACEMENT = "\ufffd"
# What this server can be asked for through the adapter; see identity.ENGINES.
CAPABILITIES = frozenset({"ids"})


class EngineRefused(Exception):
    """The engine answered 4xx: the request is at fault, not the engine."""


class EngineFailed(Exception):
    """The engine is unreachable, died, or broke its own dialect."""


@dataclass(frozen=True, slots=True)
class Delta:
    """Ids that the engine added, in order. `finish` is set on the last one only: stop or length."""

    ids: tuple[int, ...]
    finish: str | None = None


@dataclass(frozen=True, slots=True)
class _Event:
    ids: tuple[int, ...]
    text: str
    predicted: int  # ids generated so far, those included which were never sent
    finish: str | None

    @classmethod
    def parse(cls, data: bytes) -> _Event:
        try:
            event = orjson.loads(data)
            if "error" in event:
                raise EngineFailed(f"engine error: {event['error'].get('message', 'unknown')}")
            finish = None
            if event["stop"]:
                finish = _FINISH.get(event["stop_type"])
                if finish is None:
                    raise EngineFailed(f"engine stopped without a reason ({event['stop_type']})")
            return cls(
                ids=tuple(event["tokens"]),
                text=event["content"],
                predicted=event["tokens_predicted"],
                finish=finish,
            )
        except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
            raise EngineFailed("engine sent an event that is not llama.cpp's") from error


class LlamaCpp:
    """One llama.cpp server. `byte_ids[b]` is the id of the vocabulary's token for the single byte b."""

    def __init__(self, url: str, http: aiohttp.ClientSession, byte_ids: Sequence[int] | None = None) -> None:
        self._url = url.rstrip("/")
        self._http = http
        self._byte_ids = byte_ids

    async def is_healthy(self) -> bool:
        try:
            async with self._http.get(
                f"{self._url}/health", timeout=aiohttp.ClientTimeout(total=5)
            ) as response:
                return response.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False

    async def context_tokens(self) -> int:
        """Tokens one answer may have, prompt included, as the engine was started."""
        return int((await self._get("/props"))["default_generation_settings"]["n_ctx"])

    async def render(self, messages: list[dict[str, str]]) -> list[int]:
        """Chat messages -> prompt ids, ready for the assistant to speak."""
        return await self.tokenize(await self.template(messages), add_special=True)

    async def template(self, messages: list[dict[str, str]]) -> str:
        """What the model's chat template makes of them."""
        return str((await self._post("/apply-template", {"messages": messages}))["prompt"])

    async def tokenize(self, text: str, *, add_special: bool) -> list[int]:
        body = {"content": text, "add_special": add_special, "parse_special": True}
        tokens: list[int] = (await self._post("/tokenize", body))["tokens"]
        return tokens

    async def detokenize(self, ids: Sequence[int]) -> str:
        return str((await self._post("/detokenize", {"tokens": list(ids)}))["content"])

    async def generate(
        self, prompt: Sequence[int], sampling: Mapping[str, Any], max_tokens: int
    ) -> AsyncGenerator[Delta, None]:
        """Yields until a Delta with `finish`. Raises EngineRefused before the first one, EngineFailed any time.

        llama.cpp sends no event for an id that leaves the text inside a character; only its counter
        tells. Such ids are spelt from the bytes of the character that they became. Where that is not
        possible (bytes that are no UTF-8, a limit inside a character) the stretch is computed again by a
        call that returns all of its ids. Nobody has seen it yet, so any valid stretch will do.
        """
        emitted: list[int] = []
        while True:
            unknown = 0
            held: tuple[int, ...] = ()
            base = len(emitted)
            async with aclosing(self._events([*prompt, *emitted], sampling, max_tokens - base)) as events:
                async for event in events:
                    ids = event.ids
                    if missing := base + event.predicted - len(emitted) - len(held) - len(ids):
                        spelt = _spell(event, missing, self._byte_ids)
                        if spelt is None:
                            unknown = missing + len(ids)
                            break
                        ids = spelt
                    ids = held + ids
                    if not event.text and not event.finish:
                        # Perhaps the end-of-sequence id: it is not shown without its finish reason.
                        held = ids
                        continue
                    held = ()
                    emitted += ids
                    finish = event.finish or ("length" if len(emitted) >= max_tokens else None)
                    yield Delta(ids, finish)
                    if finish:
                        return
            if not unknown:
                raise EngineFailed("engine ended its stream without a finish reason")
            emitted += held
            again = await self._complete([*prompt, *emitted], sampling, unknown)
            emitted += again.ids
            finish = "stop" if again.finish == "stop" else "length" if len(emitted) >= max_tokens else None
            yield Delta(held + again.ids, finish)
            if finish:
                return

    async def _events(
        self, prompt: list[int], sampling: Mapping[str, Any], max_tokens: int
    ) -> AsyncGenerator[_Event, None]:
        """The events of one streamed completion. Leaving early closes the connection, which aborts it."""
        body = _completion(prompt, sampling, max_tokens) | {"stream": True}
        try:
            async with self._http.post(f"{self._url}/completion", json=body) as response:
                await _raise_for_status(response)
                buffer = b""
                async for piece in response.content.iter_any():
                    *events, buffer = (buffer + piece).split(b"\n\n")
                    for event in events:
                        if event.startswith(b"data: ") and event != b"data: [DONE]":
                            yield _Event.parse(event[6:])
                        elif event.startswith(b"error: "):
                            raise EngineFailed("engine reported an error in its stream")
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise EngineFailed(f"engine connection lost ({type(error).__name__})") from error

    async def _complete(self, prompt: list[int], sampling: Mapping[str, Any], max_tokens: int) -> _Event:
        body = _completion(prompt, sampling, max_tokens) | {"stream": False}
        event = _Event.parse(orjson.dumps(await self._post("/completion", body)))
        if not event.ids or len(event.ids) != event.predicted:
            raise EngineFailed("engine did not return the ids it generated")
        return event

    async def _get(self, path: str) -> dict[str, Any]:
        return await self._json(self._http.get(self._url + path))

    async def _post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        return await self._json(self._http.post(self._url + path, json=body))

    async def _json(self, call: Any) -> dict[str, Any]:
        try:
            async with call as response:
                await _raise_for_status(response)
                value: dict[str, Any] = orjson.loads(await response.read())
                return value
        except (aiohttp.ClientError, TimeoutError, OSError, orjson.JSONDecodeError) as error:
            raise EngineFailed(f"engine call failed ({type(error).__name__})") from error


async def _raise_for_status(response: aiohttp.ClientResponse) -> None:
    if response.status < 400:
        return
    try:
        message = str(orjson.loads(await response.read())["error"]["message"])
    except (orjson.JSONDecodeError, KeyError, TypeError):
        message = f"status {response.status}"
    if response.status < 500:
        raise EngineRefused(message)
    raise EngineFailed(f"engine error: {message}")


def _completion(prompt: list[int], sampling: Mapping[str, Any], max_tokens: int) -> dict[str, Any]:
    return {
        **sampling,
        "prompt": prompt,
        "n_predict": max_tokens,
        # Penalties look at the whole answer, as in vLLM, not at the last 64 tokens.
        "repeat_last_n": len(prompt) + max_tokens,
        "return_tokens": True,
        "cache_prompt": True,
        "response_fields": _LAST_EVENT_FIELDS,
    }


def _spell(event: _Event, missing: int, byte_ids: Sequence[int] | None) -> tuple[int, ...] | None:
    """The ids of `event` with the `missing` ones before it, or None where the text does not tell.

    In a vocabulary with a token per byte only those leave a character incomplete, so the last bytes
    of the text name them one by one.
    """
    if byte_ids is None or len(event.ids) != 1 or _REPLACEMENT in event.text:
        return None
    tail = event.text.encode()[-(missing + 1) :]
    if len(tail) != missing + 1 or byte_ids[tail[-1]] != event.ids[0]:
        return None
    return tuple(byte_ids[byte] for byte in tail)
