"""What a client may ask for, checked before anything is done. Errors name the field."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from kernel_steer.admission import Refusal

# A token is at least one byte of text; a chat template adds a few special tokens per message.
_TEMPLATE_TOKENS_PER_MESSAGE = 16
_TEMPLATE_TOKENS = 64


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


class ChatRequest(_Strict):
    """The body of POST /v1/chat/completions, with vLLM's additional sampling parameters."""

    model: str = Field(min_length=1, max_length=200)
    messages: list[Message] = Field(min_length=1)
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    min_tokens: int | None = Field(None, ge=0)
    temperature: Number | None = Field(None, ge=0, le=2)
    top_p: Number | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1)
    min_p: Number | None = Field(None, ge=0, le=1)
    n: int | None = Field(None, ge=1, le=16)
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    frequency_penalty: Number | None = Field(None, ge=-2, le=2)
    presence_penalty: Number | None = Field(None, ge=-2, le=2)
    repetition_penalty: Number | None = Field(None, gt=0, le=2)
    logit_bias: dict[str, Number] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    response_format: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    # vLLM's; the gateway always asks its nodes for ids, so a client may as well.
    return_token_ids: bool | None = None
    # Accepted because clients send them; they change nothing here.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @model_validator(mode="after")
    def _fits_together(self) -> ChatRequest:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is only allowed together with stream: true")
        if not self.stream and ((self.n or 1) > 1 or self.tools or self.logprobs):
            raise ValueError("n > 1, tools and logprobs are only supported together with stream: true")
        return self

    @property
    def completion_tokens_max(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def stop_strings(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def prompt_tokens_max(self) -> int:
        """An upper bound that needs no tokenizer: the hold may be too large for a while, never too small."""
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


_OURS = {
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "stream",
    "stream_options",
}
# What a continuation is sampled with; the rest belongs to the chat route or is recomputed.
SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "ignore_eos",
    "frequency_penalty", "presence_penalty", "repetition_penalty", "logit_bias",
)  # fmt: skip


def parse_chat(raw: bytes) -> ChatRequest:
    """Raises Refusal 400 that names the first wrong field."""
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise Refusal(400, "invalid_json", f"The body is not valid JSON: {error}") from None
    if not isinstance(body, dict):
        raise Refusal(400, "invalid_json", "The body must be a JSON object")
    try:
        return ChatRequest.model_validate(body)
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


def _is_place(part: int | str) -> bool:
    return isinstance(part, int) or (
        part.isidentifier() and part not in {"str", "TextPart", "float", "dict", "int"}
    )


def chat_body(request: ChatRequest) -> dict[str, Any]:
    """The same request for a node: always streamed, always with ids."""
    body = request.model_dump(exclude_none=True, exclude=_OURS)
    body |= {"stream": True, "return_token_ids": True}
    if request.include_usage and request.stream:
        body["stream_options"] = {"include_usage": True}
    return body


def sampling_parameters(request: ChatRequest) -> dict[str, Any]:
    return {name: value for name in SAMPLING if (value := getattr(request, name)) is not None}
