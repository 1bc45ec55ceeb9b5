"""A client of llama.cpp's own HTTP dialect, with every generated id accounted for."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

import aiohttp
import orjson

from kernel_steer.node.engine import Delta, EngineFailed, Wish
from kernel_steer.node.engine_http import EngineHttp
from kernel_steer.node.shape import Logprob

_FINISH = {"eos": "stop", "limit": "length"}
_LAST_EVENT_FIELDS = [
    "content",
    "tokens",
    "stop",
    "stop_type",
    "tokens_predicted",
    "completion_probabilities",
]
_REPLACEMENT = "\ufffd"
# llama.cpp stops a little before its context is full; what we promise is reachable to the last token.
CONTEXT_RESERVE = 8
_SOME_TOOL = {"type": "function", "function": {"name": "is_it_described", "parameters": {"type": "object"}}}


@dataclass(frozen=True, slots=True)
class _Event:
    ids: tuple[int, ...]
    text: str
    predicted: int  # ids generated so far, those included which were never sent
    finish: str | None
    logprobs: tuple[Logprob, ...] = ()

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
                logprobs=tuple(map(_logprob, event.get("completion_probabilities") or ())),
            )
        except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
            raise EngineFailed("engine sent an event that is not llama.cpp's") from error


class LlamaCpp:
    """One llama.cpp server. `byte_ids[b]` is the id of the vocabulary's token for the single byte b."""

    name = "llamacpp"

    def __init__(self, url: str, http: aiohttp.ClientSession, byte_ids: Sequence[int] | None = None) -> None:
        self._http = EngineHttp(url, http)
        self._byte_ids = byte_ids

    async def is_healthy(self) -> bool:
        return await self._http.is_healthy()

    async def context_tokens(self) -> int:
        """Tokens one answer may have, prompt included, as the engine was started."""
        return int((await self._http.get("/props"))["default_generation_settings"]["n_ctx"]) - CONTEXT_RESERVE

    async def capabilities(self) -> frozenset[str]:
        known = {"ids", "guided", "logprobs", "min_tokens"}
        described = await self.template([{"role": "user", "content": "Hi"}], [_SOME_TOOL])
        return frozenset(known | {"tools"} if _SOME_TOOL["function"]["name"] in described else known)  # type: ignore[index]

    async def template(self, messages: list[dict[str, Any]], tools: Sequence[dict[str, Any]] = ()) -> str:
        body = {"messages": messages} | ({"tools": list(tools)} if tools else {})
        return str((await self._http.post("/apply-template", body))["prompt"])

    async def tokenize(self, text: str, *, add_special: bool) -> list[int]:
        body = {"content": text, "add_special": add_special, "parse_special": True}
        tokens: list[int] = (await self._http.post("/tokenize", body))["tokens"]
        return tokens

    async def detokenize(self, ids: Sequence[int]) -> str:
        return str((await self._http.post("/detokenize", {"tokens": list(ids)}))["content"])

    async def generate(self, wish: Wish) -> AsyncGenerator[Delta, None]:
        """See InnerEngine.generate.

        llama.cpp knows no least length. It is asked for so many ids first, without an end, and for the rest then.
        """
        emitted: list[int] = []
        while True:
            rest = _Stretch.of(wish, len(emitted))
            async with aclosing(self._stretch([*wish.prompt, *emitted], rest)) as deltas:
                async for computed in deltas:
                    delta = _up_to_stop_id(computed, wish, len(emitted))
                    emitted += delta.ids
                    goes_on = delta.finish == "length" and rest.is_followed
                    yield replace(delta, finish=None) if goes_on else delta
                    if delta.finish and not goes_on:
                        return

    async def _stretch(self, prompt: list[int], rest: _Stretch) -> AsyncGenerator[Delta, None]:
        """Until a Delta with `finish`.

        llama.cpp sends no event for an id that leaves the text inside a character; only its counter
        tells. Such ids are spelt from the bytes of the character that they became. Where that is not
        possible (bytes that are no UTF-8, a limit inside a character, logprobs asked for) the stretch is computed
        again by a call that returns all of its ids. Nobody has seen it yet, so any valid stretch will do. A guide
        would begin again there: with one, an answer with logprobs comes in one piece.
        """
        if rest.guided and rest.wants_logprobs:
            whole = await self._complete(prompt, rest, rest.tokens)
            yield Delta(whole.ids, whole.finish or "length", whole.logprobs)
            return
        emitted: list[int] = []
        while True:
            unknown = 0
            held = Delta(())
            base = len(emitted)
            async with aclosing(self._events([*prompt, *emitted], rest, rest.tokens - base)) as events:
                async for event in events:
                    new = Delta(event.ids, event.finish, event.logprobs)
                    if missing := base + event.predicted - len(emitted) - len(held.ids) - len(event.ids):
                        spelt = None if rest.wants_logprobs else _spell(event, missing, self._byte_ids)
                        if spelt is None:
                            unknown = missing + len(event.ids)
                            break
                        new = replace(new, ids=spelt)
                    held = Delta(held.ids + new.ids, new.finish, held.logprobs + new.logprobs)
                    if not event.text and not event.finish:
                        continue  # perhaps the end-of-sequence id: it is not shown without its finish reason
                    emitted += held.ids
                    finish = event.finish or ("length" if len(emitted) >= rest.tokens else None)
                    yield replace(held, finish=finish)
                    held = Delta(())
                    if finish:
                        return
            if not unknown:
                raise EngineFailed("engine ended its stream without a finish reason")
            if rest.guided:
                raise EngineFailed("engine kept ids of a guided answer to itself")
            emitted += held.ids
            again = await self._complete([*prompt, *emitted], rest, unknown)
            emitted += again.ids
            finish = "stop" if again.finish == "stop" else "length" if len(emitted) >= rest.tokens else None
            yield Delta(held.ids + again.ids, finish, held.logprobs + again.logprobs)
            if finish:
                return

    async def _events(
        self, prompt: list[int], rest: _Stretch, max_tokens: int
    ) -> AsyncGenerator[_Event, None]:
        """The events of one streamed completion. Leaving early closes the connection, which aborts it."""
        body = _completion(prompt, rest, max_tokens) | {"stream": True}
        async with aclosing(self._http.events("/completion", body)) as events:
            async for event in events:
                if event.startswith(b"data: ") and event != b"data: [DONE]":
                    yield _Event.parse(event[6:])
                elif event.startswith(b"error: "):
                    raise EngineFailed("engine reported an error in its stream")

    async def _complete(self, prompt: list[int], rest: _Stretch, max_tokens: int) -> _Event:
        body = _completion(prompt, rest, max_tokens) | {"stream": False}
        event = _Event.parse(orjson.dumps(await self._http.post("/completion", body)))
        if not event.ids or len(event.ids) != event.predicted:
            raise EngineFailed("engine did not return the ids it generated")
        return event


@dataclass(frozen=True, slots=True)
class _Stretch:
    """A part of an answer that is computed with one set of parameters, at most `tokens` long."""

    tokens: int
    parameters: Mapping[str, Any]
    is_followed: bool = False  # by another one, when it is used up
    guided: bool = False
    wants_logprobs: bool = False

    @classmethod
    def of(cls, wish: Wish, emitted: int) -> _Stretch:
        """What comes after so many ids."""
        parameters = dict(wish.sampling)
        left = tokens = wish.max_tokens - emitted
        if wish.guide is not None:
            parameters |= (
                {"json_schema": wish.guide.schema}
                if wish.guide.schema is not None
                else {"grammar": "root ::= " + " | ".join(map(_quoted, wish.guide.choices))}
            )
        elif emitted < min(wish.min_tokens, wish.max_tokens):
            tokens = min(wish.min_tokens, wish.max_tokens) - emitted
            never = [[token, False] for token in sorted(wish.stop_token_ids)]
            parameters |= {"ignore_eos": True, "logit_bias": [*parameters.get("logit_bias", ()), *never]}
        if wish.top_logprobs is not None:
            parameters["n_probs"] = max(wish.top_logprobs, 1)  # 0 would mean none at all
        return cls(tokens, parameters, tokens < left, wish.guide is not None, wish.top_logprobs is not None)


def _quoted(word: str) -> str:
    """As a literal of llama.cpp's grammars."""
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\r", "\\r")
    return f'"{escaped}"'


def _up_to_stop_id(delta: Delta, wish: Wish, emitted: int) -> Delta:
    """The delta, ended at the first of the request's stop ids: llama.cpp does not know them."""
    for position, token in enumerate(delta.ids, start=1):
        if token in wish.stop_token_ids and emitted + position > wish.min_tokens:
            return Delta(delta.ids[:position], "stop", delta.logprobs[:position], stop_id=True)
    return delta


def _logprob(found: Mapping[str, Any]) -> Logprob:
    top = tuple(map(_logprob, found.get("top_logprobs") or ()))
    return Logprob(found["token"], tuple(found["bytes"]), found["logprob"], top)


def _completion(prompt: list[int], rest: _Stretch, max_tokens: int) -> dict[str, Any]:
    return {
        **rest.parameters,
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
