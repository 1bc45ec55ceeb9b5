"""What the adapter needs of the engine behind it, whichever dialect that speaks."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from kernel_steer.node.dialect import Guide
from kernel_steer.node.shape import Logprob


class EngineRefused(Exception):
    """The engine answered 4xx: the request is at fault, not the engine."""


class EngineFailed(Exception):
    """The engine is unreachable, died, or broke its own dialect."""


@dataclass(frozen=True, slots=True)
class Delta:
    """Ids that the engine added, in order. `finish` is set on the last one only: stop or length.

    `logprobs` has an entry per id where they were asked for. With `stop_id` the last id is one of the request's
    stop ids and no text.
    """

    ids: tuple[int, ...]
    finish: str | None = None
    logprobs: tuple[Logprob, ...] = ()
    stop_id: bool = False


@dataclass(frozen=True, slots=True)
class Wish:
    """One answer as it is asked for. `sampling` is in the words of dialect.Options."""

    prompt: Sequence[int]
    max_tokens: int
    sampling: Mapping[str, Any] = field(default_factory=dict)
    min_tokens: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    top_logprobs: int | None = None
    guide: Guide | None = None


class InnerEngine(Protocol):
    """All calls raise EngineFailed, and EngineRefused where the request is at fault."""

    name: str  # as vLLM says `owned_by`

    async def is_healthy(self) -> bool: ...

    async def context_tokens(self) -> int:
        """Tokens one answer may have, prompt included, to the last of them."""
        ...

    async def capabilities(self) -> frozenset[str]:
        """Of what identity.ENGINES lists."""
        ...

    async def template(self, messages: list[dict[str, Any]], tools: Sequence[dict[str, Any]] = ()) -> str:
        """What the model's chat template makes of them, ready for the assistant to speak."""
        ...

    async def tokenize(self, text: str, *, add_special: bool) -> list[int]: ...

    async def detokenize(self, ids: Sequence[int]) -> str: ...

    def generate(self, wish: Wish) -> AsyncGenerator[Delta, None]:
        """Yields until a Delta with `finish`. Raises EngineRefused before the first one, EngineFailed any time."""
        ...
