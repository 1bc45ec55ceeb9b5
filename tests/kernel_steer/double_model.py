"""The engine double's "model": a script instead of weights, and all the state that a real engine keeps.

What it would say next depends on what the parameters make depend on it: the position in the answer (which a
continuation from ids keeps), the tokens generated *by this request* (which it does not: seeds, frequency and
presence penalties, a grammar's state) or the whole prompt (repetition penalty).
"""

from __future__ import annotations

import random
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


def byte_tokens(text: str) -> list[int]:
    return [2 + byte for byte in text.encode()]


def words(*names: str) -> list[int]:
    return [TOKENIZER.token_to_id(name) for name in names]


def decode(ids: list[int]) -> str:
    """Done by hand: the library makes a whole run of byte tokens unreadable when its last character is cut."""
    return b"".join(map(_bytes_of, ids)).decode("utf-8", "replace")


def _bytes_of(token: int) -> bytes:
    if token < 2:
        return b""
    if token < 258:
        return bytes([token - 2])
    return WORDS[token - 258].replace("▁", " ").encode()


# Text with everything that breaks when two texts are joined: quotes, backslash, a new line, an emoji
# and a Chinese character of several tokens, words with non-ASCII letters.
SCRIPT = [
    *words("▁the"), *byte_tokens("😀"), *words("▁\"mat\"", "\\", "\n", "▁über"), *byte_tokens("漢"), *words(","),
]  # fmt: skip
# Words that come again, so that penalties have something to do.
REFRAIN = words("▁the", "▁cat", "▁sat", "▁on", "▁the", "▁cat", ",", "▁the", "▁über", "▁cat", "▁sat", "▁日本")
CALLS = [
    *words("▁the"),
    *byte_tokens('Look.<call>weather|{"city":"Köln"}</call><call>time|{}</call>'),
]
THOUGHT = byte_tokens("<think>Hm, 2+2…</think>It is 4.")
DOCUMENT = byte_tokens('{"city":"Köln","grad":-1}')
_OTHER_WORD = dict(zip(words("▁the", "▁cat", "▁sat"), words("▁on", "▁日本", "▁über"), strict=True))


def other(token: int) -> int:
    """The second best token where `token` would be the best."""
    return _OTHER_WORD.get(token, token)


@dataclass
class Said:
    """What a request generates. `reason` goes with the last token."""

    ids: list[int]
    reason: str


@dataclass
class Model:
    script: list[int]
    reason: str = "stop"
    ends_at: int | None = None  # from this position on it would rather end
    chance: random.Random = field(default_factory=random.Random)  # for what has no seed

    def generate(self, prior: list[int], body: dict[str, Any]) -> Said:
        """`prior` is the part of the answer that stands in the prompt."""
        limit = body.get("max_completion_tokens") or body.get("max_tokens") or 10_000
        least = body.get("min_tokens") or 0
        stops = body.get("stop_token_ids") or []
        generated: list[int] = []
        while len(generated) < limit:
            token = self._next(prior, generated, body)
            may_end = len(generated) >= least
            position = len(prior) + len(generated)
            if token is None or (self.ends_at is not None and position >= self.ends_at and may_end):
                return Said(generated, self.reason)
            generated.append(token)
            if token in stops and may_end:
                return Said(generated, "stop")
        at_end = self._next(prior, generated, body) is None
        return Said(generated, self.reason if at_end else "length")

    def _next(self, prior: list[int], generated: list[int], body: dict[str, Any]) -> int | None:
        if _is_guided(body):  # the grammar starts at its root with every request
            return DOCUMENT[len(generated)] if len(generated) < len(DOCUMENT) else None
        position = len(prior) + len(generated)
        if position >= len(self.script):
            return None
        token = self.script[position]
        if body.get("temperature", 1) and "temperature" in body:
            seed = body.get("seed")
            chance = self.chance if seed is None else random.Random(f"{seed}/{len(generated)}")
            token = chance.choice([token, other(token)])
        if (body.get("frequency_penalty") or body.get("presence_penalty")) and token in generated:
            token = other(token)
        if body.get("repetition_penalty", 1) != 1 and token in [*prior, *generated]:
            token = other(token)
        return token


def _is_guided(body: dict[str, Any]) -> bool:
    kind = (body.get("response_format") or {}).get("type", "text")
    return kind != "text" or bool(body.get("structured_outputs"))


# --- text and its parsers ------------------------------------------------------------------------------


def shown_text(text: str, begun_at: int, stops: list[str]) -> tuple[str, bool]:
    """The text that may be shown, and whether a stop string ended it.

    A server looks for stop strings in what it generated itself, and holds back what may become one.
    """
    generated = text[begun_at:]
    found = [generated.index(stop) for stop in stops if stop in generated]
    if found:
        return text[: begun_at + min(found)], True
    for length in range(max((len(stop) for stop in stops), default=1) - 1, 0, -1):
        if any(generated.endswith(stop[:length]) for stop in stops if len(stop) > length):
            return text[: len(text) - length], False
    return text, False


@dataclass
class Parsed:
    """What an engine's parsers make of a text."""

    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)  # name, arguments so far


def parse(text: str, *, reasoning: bool, tools: bool, ended: bool) -> Parsed:
    parsed = Parsed()
    if reasoning and _is_start(text, "<think>", ended):
        return parsed
    if reasoning and text.startswith("<think>"):
        parsed.reasoning, closed, text = text.removeprefix("<think>").partition("</think>")
        if not closed:
            parsed.reasoning = _without_start_of(parsed.reasoning, "</think>", ended)
            return parsed
    if not tools:
        parsed.content = text
        return parsed
    parsed.content, *calls = text.split("<call>")
    if not calls:
        parsed.content = _without_start_of(parsed.content, "<call>", ended)
    for call in calls:
        name, bar, rest = call.partition("|")
        if bar:
            arguments, closed, _ = rest.partition("</call>")
            parsed.calls.append(
                (name, arguments if closed else _without_start_of(arguments, "</call>", ended))
            )
    return parsed


def _is_start(text: str, mark: str, ended: bool) -> bool:
    return not ended and text != mark and mark.startswith(text)


def _without_start_of(text: str, mark: str, ended: bool) -> str:
    for length in range(min(len(text), len(mark) - 1), 0, -1):
        if not ended and text.endswith(mark[:length]):
            return text[:-length]
    return text


def difference(before: Parsed, now: Parsed, call_ids: list[str]) -> dict[str, Any]:
    """The chat delta from one to the other."""
    delta: dict[str, Any] = {}
    if now.reasoning != before.reasoning:
        delta["reasoning_content"] = now.reasoning[len(before.reasoning) :]
    if now.content != before.content:
        delta["content"] = now.content[len(before.content) :]
    calls = []
    for index, (name, arguments) in enumerate(now.calls):
        call: dict[str, Any] = {"index": index}
        known = before.calls[index][1] if index < len(before.calls) else None
        if known is None:
            call |= {"id": call_ids[index], "type": "function", "function": {"name": name}}
        if arguments != (known or ""):
            call.setdefault("function", {})["arguments"] = arguments[len(known or "") :]
        if len(call) > 1:
            calls.append(call)
    return delta | ({"tool_calls": calls} if calls else {})


# --- log probabilities ---------------------------------------------------------------------------------


def chat_logprobs(ids: list[int], top: int) -> dict[str, Any]:
    return {
        "content": [
            _entry(token) | {"top_logprobs": [_entry(each) for each in _ranked(token)[:top]]} for token in ids
        ]
    }


def completion_logprobs(ids: list[int], top: int, offsets: list[int]) -> dict[str, Any]:
    return {
        "tokens": [decode([token]) for token in ids],
        "token_logprobs": [_logprob(token) for token in ids],
        "top_logprobs": [{decode([t]): _logprob(t) for t in _ranked(token)[: max(top, 1)]} for token in ids],
        "text_offset": offsets,
    }


def _ranked(token: int) -> list[int]:
    return sorted({token, *words("▁the", "▁cat", "▁sat")}, key=_logprob, reverse=True)


def _logprob(token: int) -> float:
    return -(token % 251) / 16


def _entry(token: int) -> dict[str, Any]:
    text = decode([token])
    return {"token": text, "logprob": _logprob(token), "bytes": list(text.encode())}
