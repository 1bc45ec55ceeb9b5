"""The platform's dialect at the node's door: OpenAI's, as vLLM speaks it. What a request asks for.

Pure functions, no input or output. The bodies of the answers are in `shape`.
"""

from __future__ import annotations

import json
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
    "prompt_logprobs": (),
    "echo": (False,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "bad_words": ([],),
    "use_beam_search": (False,),
    "continue_final_message": (False,),
    "truncate_prompt_tokens": (),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
}
_STOPS_MAX = 16
_TOP_LOGPROBS_MAX = 20


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
    min_tokens: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    top_logprobs: int | None = None  # None: none are asked for; 0: of the tokens that came only
    guide: Guide | None = None


@dataclass(frozen=True, slots=True)
class Guide:
    """What the text must be: of a JSON schema, or one of some choices."""

    schema: Mapping[str, Any] | None = None
    choices: Sequence[str] = ()


def parse_options(fields: Fields, *, chat: bool) -> Options:
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
        min_tokens=fields.integer("min_tokens", 0, 1 << 31) or 0,
        stop_token_ids=frozenset(_stop_token_ids(fields)),
        top_logprobs=_top_logprobs(fields, chat=chat),
        guide=_guide(fields),
    )


def _stop_token_ids(fields: Fields) -> list[int]:
    value = fields.body.get("stop_token_ids")
    return parse_ids(value, "stop_token_ids", "a list of token ids") if value else []


def _top_logprobs(fields: Fields, *, chat: bool) -> int | None:
    """A chat asks with a flag and a number, a completion with the number alone."""
    if not chat:
        return (
            None if fields.body.get("logprobs") is False else fields.integer("logprobs", 0, _TOP_LOGPROBS_MAX)
        )
    if not fields.flag("logprobs"):
        if fields.body.get("top_logprobs"):
            raise BadRequest("top_logprobs needs logprobs: true", "top_logprobs")
        return None
    return fields.integer("top_logprobs", 0, _TOP_LOGPROBS_MAX) or 0


def _guide(fields: Fields) -> Guide | None:
    asked, outputs = fields.body.get("response_format"), fields.body.get("structured_outputs")
    if outputs is not None:
        return _structured(outputs)
    if asked is None or asked == {"type": "text"}:
        return None
    kind = asked.get("type") if isinstance(asked, dict) else None
    if kind == "json_object":
        return Guide(schema={"type": "object"})
    schema = (asked.get("json_schema") or {}).get("schema") if kind == "json_schema" else None
    if not isinstance(schema, dict):
        raise BadRequest(
            "response_format must be text, json_object, or json_schema with json_schema.schema",
            "response_format",
        )
    return Guide(schema=schema)


def _structured(outputs: Any) -> Guide:
    match outputs:
        case {"json": dict() as schema, **rest} if not any(rest.values()):
            return Guide(schema=schema)
        case {"json": str() as text, **rest} if not any(rest.values()):
            try:
                return Guide(schema=dict(json.loads(text)))
            except (ValueError, TypeError):
                raise BadRequest(
                    "structured_outputs.json must be a JSON schema", "structured_outputs"
                ) from None
        case {"choice": [*choices], **rest} if (
            choices
            and all(isinstance(choice, str) and choice for choice in choices)
            and not any(rest.values())
        ):
            return Guide(choices=choices)
    raise BadRequest(
        "structured_outputs must have json or choice; this engine has no more", "structured_outputs"
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


def parse_tools(fields: Fields) -> list[dict[str, Any]]:
    """The functions that a chat template is to describe. What the model says of them is for who reads the text."""
    tools = fields.body.get("tools") or []
    if not isinstance(tools, list) or not all(
        isinstance(tool, dict) and isinstance((tool.get("function") or {}).get("name"), str) for tool in tools
    ):
        raise BadRequest("tools must be a list of functions, each with function.name", "tools")
    return [] if fields.body.get("tool_choice") == "none" else tools


def parse_messages(fields: Fields) -> list[dict[str, Any]]:
    """Messages as llama.cpp's templates take them: role and plain text, and the calls of tools."""
    messages = fields.body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise BadRequest("messages must be a list with at least one message", "messages")
    return [_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}


def _message(message: Any, where: str) -> dict[str, Any]:
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
    calls = message.get("tool_calls")
    if role == "assistant" and isinstance(calls, list) and calls:
        return {"role": role, "content": content or "", "tool_calls": calls}
    if not isinstance(content, str):
        raise BadRequest(f"{where}.content must be a string or a list of text parts", f"{where}.content")
    answered = (
        {"tool_call_id": message["tool_call_id"]} if role == "tool" and "tool_call_id" in message else {}
    )
    return {"role": _ROLES[role], "content": content, **answered}


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
