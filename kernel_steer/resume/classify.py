"""Which resume keeps a request's meaning: what real engines remember, parameter by parameter.

APPEND continues on another node from `prompt ids + emitted ids`. That is right for greedy and for
plain sampling. It is wrong where the engine keeps state over the *generated* part alone: a seed's
generator, frequency and presence penalties, a JSON grammar, several choices, tool-call parsers.
Those are not resumed: the client gets one honest error in the stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Any, Protocol


class ResumeClass(StrEnum):
    APPEND = "append"
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
    def logprobs(self) -> bool | None: ...


def classify(request: Parameters) -> ResumeClass:
    greedy = request.temperature == 0
    stateful = (
        (request.n or 1) > 1
        or (request.seed is not None and not greedy)
        or bool(request.frequency_penalty)
        or bool(request.presence_penalty)
        or (request.response_format is not None and request.response_format.get("type") != "text")
        or bool(request.tools)
        or bool(request.logprobs)
    )
    return ResumeClass.NONE if stateful else ResumeClass.APPEND
