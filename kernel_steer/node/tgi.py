"""A client of Hugging Face's text-generation-inference: text goes in, ids come out.

It takes no prompt of ids. The adapter spells them, so an answer is continued by its text. Where the text is read as
the same ids again, as it nearly always is, nothing is different from a continuation by ids.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

import aiohttp
import orjson
from tokenizers import Tokenizer

from kernel_steer.node.dialect import Guide
from kernel_steer.node.engine import Delta, EngineFailed, EngineRefused, Wish
from kernel_steer.node.engine_http import EngineHttp
from kernel_steer.node.shape import Logprob

_FINISH = {"length": "length", "eos_token": "stop", "stop_sequence": "stop"}
_REPLACEMENT = "\ufffd"
# A character has at most four bytes, so at most three ids before the one that completes it.
_INSIDE_CHARACTER_MAX = 3
_TOP_TOKENS_MAX = 5  # of the server's defaults
# With the values that ask for nothing. The server knows no such parameter.
_UNKNOWN = {"presence_penalty": 0.0, "min_p": 0.0, "logit_bias": [], "ignore_eos": False}


class Tgi:
    """One server, version 2 or 3. `tokenizer` is the model's own, which can also encode."""

    name = "tgi"

    def __init__(self, url: str, http: aiohttp.ClientSession, tokenizer: Tokenizer) -> None:
        self._http = EngineHttp(url, http)
        self._tokenizer = tokenizer

    async def is_healthy(self) -> bool:
        return await self._http.is_healthy()

    async def context_tokens(self) -> int:
        return int((await self._http.get("/info"))["max_total_tokens"])

    async def capabilities(self) -> frozenset[str]:
        return frozenset({"ids", "guided", "logprobs"})

    async def template(self, messages: list[dict[str, Any]], tools: Sequence[dict[str, Any]] = ()) -> str:
        body = {"model": "tgi", "messages": messages} | ({"tools": list(tools)} if tools else {})
        return str((await self._http.post("/chat_tokenize", body))["templated_text"])

    async def tokenize(self, text: str, *, add_special: bool) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=add_special).ids)

    async def detokenize(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    async def generate(self, wish: Wish) -> AsyncGenerator[Delta, None]:
        """See InnerEngine.generate."""
        text, again = self._spell(list(wish.prompt))
        body = {"inputs": text, "parameters": _parameters(wish, len(again))}
        emitted = 0
        async with aclosing(self._http.events("/generate_stream", body)) as events:
            async for event in events:
                if not event.startswith(b"data:"):
                    continue
                token, finish = _token(event[5:])
                if again:
                    # Half a character of the prompt, said once more because text can not end inside one.
                    if token["id"] != again.pop(0):
                        raise EngineRefused(
                            "the prompt ends inside a character that does not go on as it began"
                        )
                    if finish:
                        raise EngineFailed("engine ended inside a character")
                    continue
                emitted += 1
                stop_id = token["id"] in wish.stop_token_ids
                if stop_id:
                    finish = "stop"
                logprobs = () if wish.top_logprobs is None else (_logprob(token),)
                yield Delta((token["id"],), finish, logprobs, stop_id=stop_id)
                if finish:
                    return
        raise EngineFailed("engine ended its stream without a finish reason")

    def _spell(self, prompt: list[int]) -> tuple[str, list[int]]:
        """The text of a prompt, and the ids at its end that are only a part of a character.

        The server puts the special tokens of a beginning in front itself; twice they would be another prompt.
        """
        end = len(prompt)
        while end and self._decode(prompt[:end]).endswith(_REPLACEMENT):
            end -= 1
            if len(prompt) - end > _INSIDE_CHARACTER_MAX:
                end = len(prompt)  # bytes that are no text: as good as it gets
                break
        inside, prompt = prompt[end:], prompt[:end]
        begins_with = self._tokenizer.encode("").ids
        if begins_with and prompt[: len(begins_with)] == begins_with:
            prompt = prompt[len(begins_with) :]
        return self._decode(prompt), inside

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))


def _parameters(wish: Wish, more: int) -> dict[str, Any]:
    """In the server's words, which refuse the values that ask for nothing. Raises EngineRefused."""
    asked = wish.sampling
    unknown = [name for name, nothing in _UNKNOWN.items() if asked.get(name, nothing) != nothing]
    if wish.min_tokens:
        unknown.append("min_tokens")
    if unknown:
        raise EngineRefused(f"{', '.join(unknown)}: not supported by this engine")
    found: dict[str, Any] = {
        "max_new_tokens": wish.max_tokens + more,
        "details": True,
        "do_sample": bool(asked.get("temperature", 1.0)),
        "top_k": asked.get("top_k") or None,
        "top_p": asked["top_p"] if 0 < asked.get("top_p", 1.0) < 1 else None,
        "temperature": asked.get("temperature") or None,
        "repetition_penalty": asked.get("repeat_penalty"),
        "frequency_penalty": asked.get("frequency_penalty") or None,
        "seed": asked["seed"] if asked.get("seed", -1) >= 0 else None,
        "top_n_tokens": min(wish.top_logprobs or 0, _TOP_TOKENS_MAX) or None,
        "grammar": None if wish.guide is None else _grammar(wish.guide),
    }
    return {name: value for name, value in found.items() if value is not None}


def _grammar(guide: Guide) -> dict[str, Any]:
    if guide.schema is not None:
        return {"type": "json", "value": guide.schema}
    return {"type": "regex", "value": "|".join(map(re.escape, guide.choices))}


def _token(data: bytes) -> tuple[dict[str, Any], str | None]:
    """The token of an event, and the finish reason if it is the last one."""
    try:
        event = orjson.loads(data)
        if "error" in event:
            raise EngineFailed(f"engine error: {event['error']}")
        token = event["token"] | {"top": event.get("top_tokens") or ()}
        details = event.get("details")
        return token, _FINISH[details["finish_reason"]] if details else None
    except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise EngineFailed("engine sent an event that is not TGI's") from error


def _logprob(token: Mapping[str, Any]) -> Logprob:
    text = str(token["text"])
    top = tuple(map(_logprob, token.get("top", ())))
    return Logprob(text, tuple(text.encode()), float(token["logprob"]), top)
