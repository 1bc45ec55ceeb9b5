"""The books in a customer's words."""

from __future__ import annotations

_KINDS = {
    "top_up": "Credits bought",
    "usage": "Answers",
    "reversal": "Correction",
    "write_off": "Debt written off",
}


def describe(kind: str) -> str:
    """What a journal of that kind was about."""
    return _KINDS.get(kind) or kind.replace("_", " ").replace(".", " ").capitalize()
