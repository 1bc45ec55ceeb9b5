"""Which resume keeps a request's meaning. The rules are those of facts about real engines, per parameter.

APPEND continues on another node from `prompt ids + emitted ids`. That is right for greedy and for
plain sampling. It is wrong where the engine keeps state over the *generated* part alone: a seed's
generator, frequency and presence penalties, a JSON grammar, several choices, tool-call parsers.
Those are not resumed: the client gets one honest error in the stream.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Protocol


class ResumeClass(StrEnum):
    APPEND = "append"
    NONE = "none"


class Parameters(Protocol):
    """The part of a request that decides."""

    n: int | None
    seed: int | None
    frequency_penalty: float | None
    presence_penalty: float | None
    response_format: object | None
    tools: object | None
    logprobs: bool | None
    temperature: float | None


def classify(request: Parameters) -> ResumeClass:
    greedy = request.temperature == 0
    stateful = (
        (request.n or 1) > 1
        or (request.seed is not None and not greedy)
        or bool(request.frequency_penalty)
        or bool(request.presence_penalty)
        or (isinstance(request.response_format, dict) and request.response_format.get("type") != "text")
        or bool(request.tools)
        or bool(request.logprobs)
    )
    return ResumeClass.NONE if stateful else ResumeClass.APPEND
