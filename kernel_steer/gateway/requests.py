"""What a client may ask for, checked before anything is done. Errors name the field."""

from __future__ import annotations

import hashlib
import re
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from kernel_steer.admission import Refusal
from kernel_steer.resume.state import Shape

# A token is at least one byte of text; a chat template adds a few special tokens per message.
_TEMPLATE_TOKENS_PER_MESSAGE = 16
_TEMPLATE_TOKENS = 64
# As in OpenAI's API: a completion that names no length is a short one, a chat goes on to the context.
COMPLETION_TOKENS_DEFAULT = 16
# Each choice is an answer of its own on a node, and costs the gateway as much.
CHOICES_MAX = 16
_PREFIX_BYTES = 4096


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class TextPart(_Strict):
    type: Literal["text"]
    text: str


class Message(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)  # tool_calls, name, ... are the node's business

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None

    @model_validator(mode="after")
    def _has_content(self) -> Message:
        if self.content is None and self.role != "assistant":
            raise ValueError("content must be a string or a list of text parts")
        return self


class StreamOptions(_Strict):
    include_usage: bool = False
    include_obfuscation: bool = False  # of OpenAI's own; never done here
    continuous_usage_stats: bool = False


Number = Annotated[float, Field(strict=False, allow_inf_nan=False)]


class AnswerRequest(_Strict):
    """What both routes have in common, with vLLM's additional sampling parameters."""

    shape: ClassVar[Shape]
    model: str = Field(min_length=1, max_length=200)
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(None, ge=1)
    min_tokens: int | None = Field(None, ge=0)
    temperature: Number | None = Field(None, ge=0, le=2)
    top_p: Number | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1)
    min_p: Number | None = Field(None, ge=0, le=1)
    n: int | None = Field(None, ge=1, le=CHOICES_MAX)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63 - CHOICES_MAX)  # choice i gets seed + i
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    frequency_penalty: Number | None = Field(None, ge=-2, le=2)
    presence_penalty: Number | None = Field(None, ge=-2, le=2)
    repetition_penalty: Number | None = Field(None, gt=0, le=2)
    logit_bias: dict[str, Number] | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None  # vLLM's: json, regex, choice, grammar, ...
    # vLLM's; the gateway always asks its nodes for ids, so a client may as well.
    return_token_ids: bool | None = None
    # Accepted because clients send them; they change nothing here.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @property
    def completion_tokens_max(self) -> int | None:
        return self.max_tokens

    @property
    def choices(self) -> int:
        return self.n or 1

    @property
    def stop_strings(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def usage_in_every_chunk(self) -> bool:
        """As in vLLM, only together with include_usage."""
        return self.include_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)

    @property
    def prompt_tokens_max(self) -> int:
        """An upper bound that needs no tokenizer: the hold may be too large for a while, never too small."""
        raise NotImplementedError

    @property
    def completion_logprobs(self) -> int | None:
        """As the completions route is asked for them: how many alternatives per token."""
        raise NotImplementedError

    @model_validator(mode="after")
    def _options_are_for_streams(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is only allowed together with stream: true")
        return self


class ChatRequest(AnswerRequest):
    """The body of POST /v1/chat/completions."""

    shape: ClassVar[Shape] = Shape.CHAT
    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None

    @property
    def completion_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def completion_tokens_max(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def prompt_tokens_max(self) -> int:
        texts = (
            part
            for message in self.messages
            for part in (
                [message.content]
                if isinstance(message.content, str)
                else [p.text for p in message.content or []]
            )
        )
        extra = sum(
            len(orjson.dumps(message.model_extra)) for message in self.messages if message.model_extra
        )
        tools = len(orjson.dumps(self.tools)) if self.tools else 0
        return (
            sum(len(text.encode()) for text in texts)
            + extra
            + tools
            + _TEMPLATE_TOKENS_PER_MESSAGE * len(self.messages)
            + _TEMPLATE_TOKENS
        )


class CompletionRequest(AnswerRequest):
    """The body of POST /v1/completions: text or token ids, to be continued."""

    shape: ClassVar[Shape] = Shape.COMPLETION
    prompt: Annotated[str, Field(min_length=1)] | Annotated[list[int], Field(min_length=1)]
    logprobs: int | None = Field(None, ge=0, le=20)

    @property
    def completion_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def tools(self) -> None:
        """A completion calls none."""

    @property
    def tool_choice(self) -> None:
        """See tools."""

    @property
    def completion_tokens_max(self) -> int | None:
        return self.max_tokens or COMPLETION_TOKENS_DEFAULT

    @property
    def prompt_tokens_max(self) -> int:
        return (
            len(self.prompt)
            if isinstance(self.prompt, list)
            else len(self.prompt.encode()) + _TEMPLATE_TOKENS
        )


def prefix_digest(request: AnswerRequest) -> bytes:
    """Equal for requests that begin alike: the turns of a conversation, or what the client says belongs together."""
    if request.prompt_cache_key:
        start = request.prompt_cache_key.encode()
    elif isinstance(request, ChatRequest):
        start = orjson.dumps([message.content for message in _opening(request.messages)], default=dict)
    else:
        start = (
            orjson.dumps(request.prompt[:_PREFIX_BYTES]) if isinstance(request, CompletionRequest) else b""
        )
    return hashlib.blake2b(start[:_PREFIX_BYTES], digest_size=8, person=request.shape.encode()).digest()


def _opening(messages: list[Message]) -> list[Message]:
    """Up to the first thing that the user said."""
    first = next((i for i, message in enumerate(messages) if message.role == "user"), 0)
    return messages[: first + 1]


_OURS = {
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "stream",
    "stream_options",
    "n",  # single answers, side by side
}
# What a continuation is sampled with; the rest belongs to the chat route or is recomputed.
SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "ignore_eos",
    "frequency_penalty", "presence_penalty", "repetition_penalty", "logit_bias",
)  # fmt: skip


R = TypeVar("R", bound=AnswerRequest)


def parse_request(kind: type[R], raw: bytes) -> R:
    """Raises Refusal 400 that names the first wrong field."""
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise Refusal(400, "invalid_json", f"The body is not valid JSON: {error}") from None
    if not isinstance(body, dict):
        raise Refusal(400, "invalid_json", "The body must be a JSON object")
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        # Union members appear in the path; a client knows only names and positions.
        place = ".".join(str(part) for part in first["loc"] if _is_place(part))
        reason = first["msg"].removeprefix("Value error, ")
        if first["type"] == "extra_forbidden":
            raise Refusal(400, "unknown_parameter", f"Unknown parameter: {place}", param=place) from None
        text = f"{place}: {reason}" if place else reason
        code = "missing_required_parameter" if first["type"] == "missing" else "invalid_value"
        raise Refusal(400, code, text, param=place or None) from None


_TYPE_IN_PATH = re.compile(r"(str|int|float|dict|list|TextPart|constrained-.*)(\[.*)?$")


def _is_place(part: int | str) -> bool:
    return isinstance(part, int) or (part.isidentifier() and not _TYPE_IN_PATH.match(part))


def node_body(request: AnswerRequest) -> dict[str, Any]:
    """The same request for a node: always streamed, always with ids, its length always said."""
    body = request.model_dump(exclude_none=True, exclude=_OURS)
    body |= {"stream": True, "return_token_ids": True}
    if request.shape is Shape.COMPLETION:
        body["max_tokens"] = request.completion_tokens_max
    if request.include_usage and request.stream:
        body["stream_options"] = {"include_usage": True}
        if request.usage_in_every_chunk:
            body["stream_options"]["continuous_usage_stats"] = True
    return body


def sampling_parameters(request: AnswerRequest) -> dict[str, Any]:
    return {name: value for name in SAMPLING if (value := getattr(request, name)) is not None}
