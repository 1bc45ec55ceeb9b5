"""The platform's dialect at the node's door: OpenAI's, as vLLM speaks it. Requests in, JSON out.

Pure functions, no input or output: what a request asks for, and the bodies of the answers to it.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


class BadRequest(Exception):
    """Becomes an error in OpenAI's format; `param` names the field."""

    def __init__(self, message: str, param: str | None = None, *, status: int = 400) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.status = status


_ERROR_TYPES = {400: "BadRequestError", 404: "NotFoundError", 405: "MethodNotAllowed", 413: "PayloadTooLarge"}


def error_body(status: int, message: str, param: str | None = None) -> dict[str, Any]:
    kind = _ERROR_TYPES.get(status, "InternalServerError" if status >= 500 else "BadRequestError")
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}


# What this engine cannot honour, with the values that ask for nothing.
_REFUSED: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "prompt_logprobs": (),
    "echo": (False,),
    "suffix": ("",),
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "min_tokens": (0,),
    "stop_token_ids": ([],),
    "bad_words": ([],),
    "use_beam_search": (False,),
    "continue_final_message": (False,),
    "truncate_prompt_tokens": (),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
}
_STOPS_MAX = 16


class Fields:
    """Typed access to a JSON object; every complaint names the field and what would be right."""

    def __init__(self, body: Any) -> None:
        if not isinstance(body, dict):
            raise BadRequest("the body must be a JSON object")
        self.body: dict[str, Any] = body

    def flag(self, name: str, default: bool = False) -> bool:
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise BadRequest(f"{name} must be true or false", name)
        return value

    def integer(self, name: str, low: int, high: int) -> int | None:
        value = self._get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise BadRequest(f"{name} must be a whole number from {low} to {high}", name)
        return value

    def number(self, name: str, default: float, low: float, high: float) -> float:
        value = self._get(name, default)
        # The comparison is false for NaN, which must not reach the engine.
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise BadRequest(f"{name} must be a number from {low:g} to {high:g}", name)
        return value

    def strings(self, name: str) -> list[str]:
        value = self._get(name, [])
        values = [value] if isinstance(value, str) else value
        if not isinstance(values, list) or not all(isinstance(item, str) and item for item in values):
            raise BadRequest(f"{name} must be a string or a list of strings, none of them empty", name)
        if len(values) > _STOPS_MAX:
            raise BadRequest(f"{name} must have at most {_STOPS_MAX} entries", name)
        return values

    def refuse_unsupported(self) -> None:
        for name, harmless in _REFUSED.items():
            value = self.body.get(name)
            # Compared with their types: 0 is not false here, it asks for something.
            if value is not None and not any(type(value) is type(ok) and value == ok for ok in harmless):
                raise BadRequest(f"{name} is not supported by this engine with this value", name)

    def _get(self, name: str, default: Any = None) -> Any:
        value = self.body.get(name)
        return default if value is None else value


@dataclass(frozen=True, slots=True)
class Options:
    """What every generating request has in common. `sampling` is in llama.cpp's words."""

    stream: bool
    include_usage: bool
    usage_in_every_chunk: bool
    return_token_ids: bool
    max_tokens: int | None
    stop: Sequence[str]
    sampling: Mapping[str, Any]


def parse_options(fields: Fields) -> Options:
    fields.refuse_unsupported()
    stream = fields.flag("stream")
    stream_options = fields.body.get("stream_options")
    if stream_options is not None and not (stream and isinstance(stream_options, dict)):
        raise BadRequest("stream_options must be an object, and only with stream: true", "stream_options")
    extras = Fields(stream_options or {})
    max_tokens = fields.integer("max_completion_tokens", 1, 1 << 31)
    if max_tokens is None:
        max_tokens = fields.integer("max_tokens", 1, 1 << 31)
    return Options(
        stream=stream,
        include_usage=extras.flag("include_usage"),
        usage_in_every_chunk=extras.flag("continuous_usage_stats"),
        return_token_ids=fields.flag("return_token_ids"),
        max_tokens=max_tokens,
        stop=fields.strings("stop"),
        sampling=_sampling(fields),
    )


def _sampling(fields: Fields) -> dict[str, Any]:
    """The defaults are OpenAI's and vLLM's; llama.cpp's own are narrower, so all of them are named."""
    top_k = fields.integer("top_k", -1, 1 << 31)
    seed = fields.integer("seed", -(1 << 63), (1 << 64) - 1)
    return {
        "temperature": fields.number("temperature", 1.0, 0.0, 2.0),
        "top_p": fields.number("top_p", 1.0, 0.0, 1.0),
        "top_k": 0 if top_k in (None, -1) else top_k,
        "min_p": fields.number("min_p", 0.0, 0.0, 1.0),
        "presence_penalty": fields.number("presence_penalty", 0.0, -2.0, 2.0),
        "frequency_penalty": fields.number("frequency_penalty", 0.0, -2.0, 2.0),
        "repeat_penalty": fields.number("repetition_penalty", 1.0, 0.01, 2.0),
        "seed": -1 if seed is None else seed % (1 << 32),
        "logit_bias": _logit_bias(fields),
        "ignore_eos": fields.flag("ignore_eos"),
    }


def _logit_bias(fields: Fields) -> list[list[float]]:
    value = fields.body.get("logit_bias") or {}
    try:
        pairs = [[int(token), float(bias)] for token, bias in value.items()]
    except (AttributeError, TypeError, ValueError):
        pairs = [[-1, 0.0]]
    if any(token < 0 or not -100 <= bias <= 100 for token, bias in pairs):
        raise BadRequest("logit_bias must map token ids to numbers from -100 to 100", "logit_bias")
    return pairs


def parse_messages(fields: Fields) -> list[dict[str, str]]:
    """Messages as llama.cpp's templates take them: role and plain text."""
    messages = fields.body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise BadRequest("messages must be a list with at least one message", "messages")
    return [_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}


def _message(message: Any, where: str) -> dict[str, str]:
    if not isinstance(message, dict):
        raise BadRequest(f"{where} must be an object with role and content", where)
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise BadRequest(f"{where}.role must be one of {', '.join(_ROLES)}", f"{where}.role")
    content = message.get("content")
    if isinstance(content, list):
        parts = [
            part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
            for part in content
        ]
        content = "".join(parts) if all(isinstance(part, str) for part in parts) else None  # type: ignore[arg-type]
    if not isinstance(content, str):
        raise BadRequest(f"{where}.content must be a string or a list of text parts", f"{where}.content")
    return {"role": _ROLES[role], "content": content}


def parse_prompt(fields: Fields, name: str = "prompt") -> str | list[int]:
    prompt = fields.body.get(name)
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]  # a batch of one
    if isinstance(prompt, str) and prompt:
        return prompt
    return parse_ids(prompt, name, "a string or a list of token ids, not empty")


def parse_ids(value: Any, name: str, expected: str = "a list of token ids, not empty") -> list[int]:
    if (
        not isinstance(value, list)
        or not value
        or not all(type(item) is int and 0 <= item < 1 << 31 for item in value)
    ):
        raise BadRequest(f"{name} must be {expected}", name)
    return value


def fit_max_tokens(prompt_tokens: int, asked: int | None, context: int, default: int | None) -> int:
    """How many tokens may come. Raises BadRequest where prompt and answer do not fit into `context`."""
    if prompt_tokens >= context:
        raise BadRequest(
            f"This model's maximum context length is {context} tokens. However, your prompt has "
            f"{prompt_tokens} tokens. Please shorten it.",
            "prompt",
        )
    room = context - prompt_tokens
    if asked is None:
        return min(room, default) if default else room
    if asked > room:
        raise BadRequest(
            f"This model's maximum context length is {context} tokens. However, you asked for "
            f"{prompt_tokens + asked} tokens ({prompt_tokens} in the prompt, {asked} in the answer).",
            "max_tokens",
        )
    return asked


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of an answer: its ids, and the text that they made ready (maybe none).

    `finish` is set on the last one: stop or length. `stop_string` is the string that ended the answer.
    """

    ids: tuple[int, ...]
    text: str
    finish: str | None = None
    stop_string: str | None = None


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
        choice |= {"logprobs": None, "finish_reason": piece.finish, "stop_reason": piece.stop_string}
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
            "logprobs": None,
            "finish_reason": pieces[-1].finish,
            "stop_reason": pieces[-1].stop_string,
        }
        return self._head(whole=True) | extra | {"choices": [choice], "usage": self._usage(len(ids))}

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
