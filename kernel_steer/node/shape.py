"""The bodies of the answers of a node: OpenAI's JSON as vLLM writes it, ids included."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kernel_steer.node.dialect import Options


@dataclass(frozen=True, slots=True)
class Logprob:
    """How likely a token was, and which others were likely too."""

    token: str
    bytes: tuple[int, ...]
    logprob: float
    top: tuple[Logprob, ...] = ()

    def as_chat(self) -> dict[str, Any]:
        own = {"token": self.token, "logprob": self.logprob, "bytes": list(self.bytes)}
        return own | {
            "top_logprobs": [
                {k: v for k, v in top.as_chat().items() if k != "top_logprobs"} for top in self.top
            ]
        }


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of an answer: its ids, and the text that they made ready (maybe none).

    `finish` is set on the last one: stop or length. `stop_string` is the string, or the stop id, that ended it.
    `logprobs` has an entry per id where they were asked for.
    """

    ids: tuple[int, ...]
    text: str
    finish: str | None = None
    stop_string: str | int | None = None
    logprobs: tuple[Logprob, ...] = ()


@dataclass(frozen=True, slots=True)
class AnswerShape:
    """Builds the bodies of one answer. In a choice the ids come before the text: whoever has a piece of
    the text of a cut event knows its ids."""

    chat: bool
    model: str
    prompt_ids: Sequence[int]
    options: Options
    answer_id: str
    created: int

    @classmethod
    def start(cls, *, chat: bool, model: str, prompt_ids: Sequence[int], options: Options) -> AnswerShape:
        prefix = "chatcmpl-" if chat else "cmpl-"
        return cls(chat, model, prompt_ids, options, prefix + uuid.uuid4().hex, int(time.time()))

    def role_chunk(self) -> dict[str, Any]:
        """The first chunk of a chat stream."""
        choice = {
            "index": 0,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        extra = {"prompt_token_ids": list(self.prompt_ids)} if self.options.return_token_ids else {}
        return self._chunk([choice], 0, extra)

    def piece_chunk(self, piece: Piece, completion_tokens: int, *, first: bool) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": 0}
        if self.options.return_token_ids:
            if first and not self.chat:
                choice["prompt_token_ids"] = list(self.prompt_ids)
            choice["token_ids"] = list(piece.ids)
        if self.chat:
            choice["delta"] = {"content": piece.text}
        else:
            choice["text"] = piece.text
        choice |= {
            "logprobs": self._logprobs(piece.logprobs),
            "finish_reason": piece.finish,
            "stop_reason": piece.stop_string,
        }
        return self._chunk([choice], completion_tokens)

    def usage_chunk(self, completion_tokens: int) -> dict[str, Any]:
        return self._head() | {"choices": [], "usage": self._usage(completion_tokens)}

    def whole(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        """The answer of a request without streaming."""
        text = "".join(piece.text for piece in pieces)
        ids = [token for piece in pieces for token in piece.ids]
        choice: dict[str, Any] = {"index": 0}
        extra: dict[str, Any] = {}
        if self.options.return_token_ids:
            (extra if self.chat else choice)["prompt_token_ids"] = list(self.prompt_ids)
            choice["token_ids"] = ids
        if self.chat:
            choice["message"] = {"role": "assistant", "content": text}
        else:
            choice["text"] = text
        choice |= {
            "logprobs": self._logprobs([one for piece in pieces for one in piece.logprobs]),
            "finish_reason": pieces[-1].finish,
            "stop_reason": pieces[-1].stop_string,
        }
        return self._head(whole=True) | extra | {"choices": [choice], "usage": self._usage(len(ids))}

    def _logprobs(self, found: Sequence[Logprob]) -> dict[str, Any] | None:
        """A chat has a list of objects, a completion parallel lists. Where a text begins is for who joins them."""
        if self.options.top_logprobs is None:
            return None
        if self.chat:
            return {"content": [one.as_chat() for one in found]}
        return {
            "tokens": [one.token for one in found],
            "token_logprobs": [one.logprob for one in found],
            "top_logprobs": [{top.token: top.logprob for top in one.top} or None for one in found],
            "text_offset": [],
        }

    def _chunk(
        self, choices: list[Any], completion_tokens: int, extra: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        chunk = self._head() | dict(extra or {}) | {"choices": choices}
        if self.options.usage_in_every_chunk:
            chunk["usage"] = self._usage(completion_tokens)
        return chunk

    def _head(self, *, whole: bool = False) -> dict[str, Any]:
        kind = "text_completion" if not self.chat else "chat.completion" if whole else "chat.completion.chunk"
        return {"id": self.answer_id, "object": kind, "created": self.created, "model": self.model}

    def _usage(self, completion_tokens: int) -> dict[str, int]:
        prompt_tokens = len(self.prompt_ids)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
        }
