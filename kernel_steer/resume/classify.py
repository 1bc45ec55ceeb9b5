"""Which resume keeps a request's meaning: what real engines remember, parameter by parameter.

APPEND continues on another node from `prompt ids + emitted ids`. That is right for greedy and for plain
sampling, and wrong where an engine keeps state over the *generated* part alone: a seed's generator, the
frequency and presence penalties, a JSON grammar, the numbering of logprobs.

REPLAY asks the next node the same question with the same seed and swallows its answer while it repeats what
was said. Where it says something else, a request whose meaning allows it goes on by APPEND; one with a
grammar cannot, and gets an honest error.

NONE is for what neither can do here: several choices at once, and tool calls, whose parsers live in the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Any, Protocol


class ResumeClass(StrEnum):
    APPEND = "append"
    REPLAY = "replay"
    NONE = "none"


class Parameters(Protocol):
    """The part of a request that decides."""

    @property
    def n(self) -> int | None: ...
    @property
    def seed(self) -> int | None: ...
    @property
    def temperature(self) -> float | None: ...
    @property
    def frequency_penalty(self) -> float | None: ...
    @property
    def presence_penalty(self) -> float | None: ...
    @property
    def response_format(self) -> dict[str, Any] | None: ...
    @property
    def tools(self) -> Sequence[Any] | None: ...
    @property
    def logprobs(self) -> int | None: ...


def classify(request: Parameters) -> ResumeClass:
    if (request.n or 1) > 1 or request.tools:
        return ResumeClass.NONE
    sampled_by_seed = request.seed is not None and request.temperature != 0
    counts_output = request.frequency_penalty or request.presence_penalty
    if sampled_by_seed or counts_output or not may_append(request):
        return ResumeClass.REPLAY
    return ResumeClass.APPEND


def may_append(request: Parameters) -> bool:
    """Whether a valid answer may go on from ids when it is not the one that a replay would have given."""
    guided = request.response_format is not None and request.response_format.get("type") != "text"
    return not guided and not request.logprobs
