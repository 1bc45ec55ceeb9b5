"""What a request is to the relay, what all answers share, and the two ways that an answer is interrupted."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kernel_steer.admission import Admission, ModelCard, Node
from kernel_steer.engine.base import Engine
from kernel_steer.resume.circuit import Circuits
from kernel_steer.resume.classify import ResumeClass
from kernel_steer.resume.state import Shape
from kernel_steer.resume.tokens import TokenizerStore
from kernel_steer.upstream.legs import Upstreams


@dataclass(frozen=True, slots=True)
class Limits:
    """Times in seconds."""

    head_s: float = 120.0  # request sent to head of the answer, prefill included
    done_gap_s: float = 1.0  # between finish_reason and [DONE]
    # Silence in mid-answer after which the node is taken for dead: until there is a rhythm, and then
    # that many times the longest of the answer's own gaps (see pace.py).
    token_gap_s: float = 20.0
    gap_factor: float = 5.0
    gap_floor_s: float = 2.0
    search_s: float = 10.0  # without a node: then the answer fails
    first_search_s: float = 2.0  # the same before anything was said: then 503
    resume_s: float = 60.0  # from the loss of a node to the next one's words, all tries together
    ping_s: float = 1.0
    keep_alive_s: float = 10.0  # from request to first sign of life, then between them, before the first word
    poll_s: float = 0.02
    retry_s: float = 0.2  # before a node that took no leg is asked once more, as there is no other
    legs_max: int = 5
    deaths_max: int = 3  # of nodes that had not said a word: perhaps the request is what kills them


@dataclass(frozen=True, slots=True)
class Work:
    """A request as the relay needs it."""

    request_id: str
    shape: Shape
    model: str
    body: dict[str, Any]  # for the node's route of that shape
    sampling: dict[str, Any]  # the part that a continuation repeats
    completion_tokens_max: int | None
    min_tokens: int
    choices: int
    include_usage: bool
    resume_class: ResumeClass
    may_append: bool = True  # after a replay that went another way
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None  # as the completions route is asked for them
    usage_in_every_chunk: bool = False
    customer: str = ""  # whose request it is; see Circuits
    prefix: bytes = b""  # digest of how the prompt begins
    received_at: float = field(default_factory=time.monotonic)  # since then the client has heard nothing


@dataclass(slots=True)
class Services:
    """What every run of this gateway shares."""

    admission: Admission
    engine: Engine
    tokenizers: TokenizerStore
    limits: Limits = field(default_factory=Limits)
    circuits: Circuits = field(default_factory=Circuits)
    on_first_byte: Callable[[Node], None] = lambda node: None
    upstreams: Upstreams = field(default_factory=Upstreams)
    reasoning_models: set[str] = field(default_factory=set)  # those that were heard to think

    def parts_thoughts(self, model: ModelCard) -> bool:
        """Declared, or known from an answer before."""
        return model.reasoning or model.name in self.reasoning_models


MOVED = "moved"  # LegReport.ended of a leg that was left for a standby before its node went away
WARMED = "warmed"  # of the look at the prompt that the standby took beforehand
SHADOWED = "shadowed"  # of a replay beside the answer that was not needed in the end


class LegLost(Exception):
    """The leg ended before the answer was complete. `how` is LegReport.ended."""

    def __init__(self, how: str, detail: str = "") -> None:
        super().__init__(detail or how)
        self.how = how


class Diverged(LegLost):
    """The node is well, but its replay is not the answer that was begun."""

    def __init__(self, detail: str) -> None:
        super().__init__("diverged", detail)


class GiveUp(Exception):
    """No way to go on; the client is told the message, as an error event."""

    def __init__(self, message: str, *, kind: str = "server_error", code: str = "node_lost") -> None:
        super().__init__(message)
        self.error = {"message": message, "type": kind, "param": None, "code": code}
