"""Log probabilities over two legs: a continuation is asked on the completions route, which words them in
another way than the chat route does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def as_chat(said: dict[str, Any], top: int) -> dict[str, Any]:
    """Completions' parallel lists as chat's entries, with at most `top` alternatives each."""
    tokens, values = said["tokens"], said["token_logprobs"]
    alternatives = said.get("top_logprobs") or [None] * len(tokens)
    return {
        "content": [
            _entry(token, value) | {"top_logprobs": _best(others, top)}
            for token, value, others in zip(tokens, values, alternatives, strict=True)
        ]
    }


def _best(alternatives: dict[str, float] | None, top: int) -> list[dict[str, Any]]:
    ranked = sorted((alternatives or {}).items(), key=lambda item: -item[1])
    return [_entry(token, value) for token, value in ranked[:top]]


def _entry(token: str, value: float) -> dict[str, Any]:
    return {"token": token, "logprob": value, "bytes": list(token.encode("utf-8", "replace"))}


def last(said: dict[str, Any] | None, tokens: int) -> dict[str, Any] | None:
    """The entries of the last so many tokens."""
    if not said:
        return said
    return {
        name: (values[len(values) - tokens :] if isinstance(values, list) else values)
        for name, values in said.items()
    }


def joined(parts: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """The whole answer's, from those of its events; None when there are none."""
    if not parts:
        return None
    return {
        name: [entry for part in parts for entry in part.get(name) or ()]
        for name, values in parts[0].items()
        if isinstance(values, list)
    }
