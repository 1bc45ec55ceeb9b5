"""The books in a customer's words."""

from __future__ import annotations

_KINDS = {
    "top_up": "Credits bought",
    "reversal": "Correction",
    "write_off": "Debt written off",
}


def describe(kind: str, lines: int = 1) -> str:
    """What a journal of that kind was about; `lines` are the usage lines it nets."""
    if kind == "usage":
        return "1 answer" if lines == 1 else f"{lines:,} answers"
    return _KINDS.get(kind) or kind.replace("_", " ").replace(".", " ").capitalize()
