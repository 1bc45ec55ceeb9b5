"""The customers of the story: official OpenAI clients that write down every token and when it came."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import openai

TOPICS = (
    "Once upon a time, in a small village by the sea,",
    "The history of the steam engine begins with",
    "Dear diary, today I walked through the old town and",
    "The recipe for a good vegetable soup starts with",
    "The sun rose over the mountains while the expedition",
    "In the year 1889 the city of Paris was",
    "A computer program is a list of instructions that",
    "The three most important rules of gardening are",
)


@dataclass(slots=True)
class Stream:
    """One streamed answer as its client saw it."""

    number: int
    prompt: str
    request_id: str = ""
    node: str = ""
    ids: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)  # time.monotonic() at each id
    text: str = ""
    finish_reason: str | None = None
    usage_tokens: int | None = None
    error: str | None = None
    reset: bool = False

    @property
    def ended(self) -> bool:
        return self.finish_reason is not None or self.error is not None


class Customer:
    """A pilot with an API key. `tokens` is the length of every answer: end-of-text is ignored."""

    def __init__(self, *, base_url: str, api_key: str, model: str, tokens: int) -> None:
        self._client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0, timeout=120)
        self._model = model
        self._tokens = tokens

    async def close(self) -> None:
        await self._client.close()

    async def stream_all(self, streams: Sequence[Stream]) -> None:
        await asyncio.gather(*(self.stream(one) for one in streams))

    async def stream(self, stream: Stream, *, tokens: int | None = None) -> None:
        """Fills in the stream; an error is noted, never raised."""
        try:
            await self._read(stream, tokens or self._tokens)
        except openai.APIConnectionError as error:
            stream.reset, stream.error = True, type(error).__name__
        except openai.APIStatusError as error:
            stream.error = f"HTTP {error.status_code}: {error.message}"
        except openai.APIError as error:
            stream.error = error.message
        except Exception as error:  # noqa: BLE001 - httpx raises its own when a body is cut
            stream.reset, stream.error = True, type(error).__name__

    async def _read(self, stream: Stream, tokens: int) -> None:
        raw = await self._client.chat.completions.with_raw_response.create(
            model=self._model,
            messages=[{"role": "user", "content": stream.prompt}],
            temperature=0,
            max_tokens=tokens,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
        stream.request_id = raw.headers["x-request-id"]
        stream.node = raw.headers["x-apex-node"]
        async for chunk in raw.parse():
            now = time.monotonic()
            if chunk.usage is not None:
                stream.usage_tokens = chunk.usage.completion_tokens
            for choice in chunk.choices:
                ids = (choice.model_extra or {}).get("token_ids") or []
                stream.ids += ids
                stream.times += [now] * len(ids)
                stream.text += choice.delta.content or ""
                stream.finish_reason = choice.finish_reason or stream.finish_reason
