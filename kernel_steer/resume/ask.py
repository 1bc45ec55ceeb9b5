"""What a node is asked: the client's question, the rest of its answer, or the same question again."""

from __future__ import annotations

from typing import Any

from kernel_steer.admission import Node, Resume
from kernel_steer.resume.leg import Mode
from kernel_steer.resume.state import AnswerState, Shape
from kernel_steer.resume.work import Work

Question = tuple[str, dict[str, Any]]  # path and body


def question(work: Work, state: AnswerState, node: Node, mode: Mode, *, tokens_left: int) -> Question:
    """`tokens_left` is what the answer may still have; only a continuation is told."""
    if mode is Mode.APPEND:
        return Shape.COMPLETION.path, _rest_by_ids(work, state, tokens_left)
    body = work.body
    if mode is Mode.TEXT:
        body = _rest_by_text(work, state, tokens_left)
    if node.resume is not Resume.IDS:
        body = _in_plain_dialect(body)
    return work.shape.path, body


def _rest_by_ids(work: Work, state: AnswerState, tokens_left: int) -> dict[str, Any]:
    """A raw completion of everything so far. Never `echo` or prompt logprobs: the client has those."""
    body = work.sampling | {
        "model": work.model,
        "prompt": [*(state.prompt_ids or ()), *state.ids],
        "max_tokens": tokens_left,
        "stream": True,
        "return_token_ids": True,
    }
    if (min_tokens := work.min_tokens - len(state.ids)) > 0:
        body["min_tokens"] = min_tokens
    if "seed" in body:
        # The same seed would start the same generator again, and repeat its draws.
        body["seed"] = (body["seed"] * 1_000_003 + len(state.ids)) & 0x7FFFFFFF
    if work.logprobs is not None:
        body["logprobs"] = work.logprobs
    return body


def _rest_by_text(work: Work, state: AnswerState, tokens_left: int) -> dict[str, Any]:
    """For servers that know no ids: they are given the text so far, and read it with their own tokenizer."""
    body = dict(work.body)
    if work.shape is Shape.COMPLETION:
        body["prompt"] = body["prompt"] + state.text
    else:
        begun = {"role": "assistant", "content": state.text}
        body["messages"] = [*body["messages"], begun]
        body |= {"add_generation_prompt": False, "continue_final_message": True}
    limit = "max_completion_tokens" if "max_completion_tokens" in body else "max_tokens"
    if limit in body:
        body[limit] = tokens_left
    if "min_tokens" in body:
        body["min_tokens"] = max(0, work.min_tokens - state.completion_tokens)
    return body


def _in_plain_dialect(body: dict[str, Any]) -> dict[str, Any]:
    """Without the words that only our dialect has; with usage, as there are no ids to count."""
    plain = {name: value for name, value in body.items() if name != "return_token_ids"}
    return plain | {"stream_options": {"include_usage": True}}
