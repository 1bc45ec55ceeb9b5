"""Which resume keeps a request's meaning: what real engines remember, parameter by parameter.

APPEND continues on another node from `prompt ids + emitted ids`. That is right for greedy and for plain
sampling, and wrong where an engine keeps state over the *generated* part alone: a seed's generator, the
frequency and presence penalties, a JSON grammar, the parser of tool calls.

REPLAY asks the next node the same question with the same seed and swallows its answer while it repeats what
was said. Where it says something else, a request whose meaning allows it goes on by APPEND; one with a
grammar or a parser cannot, and gets an honest error.

docs/gateway.md has the table of all parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Any, Protocol


class ResumeClass(StrEnum):
    APPEND = "append"
    REPLAY = "replay"


class Parameters(Protocol):
    """The part of a request that decides."""

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
    def structured_outputs(self) -> dict[str, Any] | None: ...
    @property
    def tools(self) -> Sequence[Any] | None: ...
    @property
    def tool_choice(self) -> Any: ...


def classify(request: Parameters) -> ResumeClass:
    sampled_by_seed = request.seed is not None and request.temperature != 0
    counts_output = request.frequency_penalty or request.presence_penalty
    if sampled_by_seed or counts_output or not may_append(request):
        return ResumeClass.REPLAY
    return ResumeClass.APPEND


def may_append(request: Parameters) -> bool:
    """Whether a valid answer may go on from ids when it is not the one that a replay would have given."""
    guided = request.response_format is not None and request.response_format.get("type") != "text"
    return not (guided or request.structured_outputs or parses_tools(request))


def parses_tools(request: Parameters) -> bool:
    return bool(request.tools) and request.tool_choice != "none"
