"""A client's request as work for the relay: what nodes are asked, and which resume keeps its meaning."""

from __future__ import annotations

import uuid

from kernel_steer.gateway.requests import (
    ChatRequest,
    CompletionRequest,
    node_body,
    prefix_digest,
    sampling_parameters,
)
from kernel_steer.resume.classify import ResumeClass, classify, may_append
from kernel_steer.resume.state import Shape
from kernel_steer.resume.work import Work


def make_work(
    asked: ChatRequest | CompletionRequest,
    *,
    reasoning: bool,
    request_id: str,
    customer: str,
    received_at: float,
) -> Work:
    """`reasoning`: the model's nodes part its thoughts from its answer. `received_at` is by time.monotonic()."""
    # Their parser is one more that cannot be started in the middle of an answer.
    parsed = reasoning and asked.shape is Shape.CHAT
    resume_class = ResumeClass.REPLAY if parsed else classify(asked)
    body = node_body(asked)
    if resume_class is ResumeClass.REPLAY:
        # Without a seed of the client's the first node would draw one that no other can repeat.
        body.setdefault("seed", uuid.UUID(request_id).int & 0x7FFFFFFF)
    return Work(
        request_id=request_id,
        shape=asked.shape,
        model=asked.model,
        body=body,
        sampling=sampling_parameters(asked),
        completion_tokens_max=asked.completion_tokens_max,
        min_tokens=asked.min_tokens or 0,
        choices=asked.choices,
        include_usage=asked.include_usage,
        resume_class=resume_class,
        may_append=may_append(asked) and not parsed,
        stop=asked.stop_strings,
        stop_token_ids=asked.stop_token_ids or (),
        ignore_eos=bool(asked.ignore_eos),
        logprobs=asked.completion_logprobs,
        usage_in_every_chunk=asked.usage_in_every_chunk,
        customer=customer,
        prefix=prefix_digest(asked),
        received_at=received_at,
    )
