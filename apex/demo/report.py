"""What the story proved: figures, the promises that must hold, the report file."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(slots=True)
class Report:
    """The content of var/demo-report.json, plus what only the table shows."""

    engine: str = ""
    engine_detail: str = ""
    streams: int = 0
    evictions: int = 0
    client_resets: int = 0
    tokens_lost: int = 0
    tokens_duplicated: int = 0
    answers_identical: int = 0
    texts_differing: int = 0
    resumed: int = 0
    resume_gap_ms: list[float] = field(default_factory=list)
    reroute_ms: list[float] = field(default_factory=list)
    flip_ms: list[float] = field(default_factory=list)
    delivered_tokens: int = 0
    charged_tokens: int = 0
    ledger_ok: bool = False
    errors: list[str] = field(default_factory=list)
    urls: dict[str, str] = field(default_factory=dict)

    @property
    def promises(self) -> dict[str, bool]:
        """Each must be true for exit status 0."""
        return {
            "every answer was finished": not self.errors,
            "the node was lost in mid-answer": self.evictions > 0 and self.resumed > 0,
            "no client connection was reset": self.client_resets == 0,
            "no token was lost": self.tokens_lost == 0,
            "no token came twice": self.tokens_duplicated == 0,
            "every text is what its tokens say": self.texts_differing == 0,
            "delivered tokens = charged tokens": 0 < self.delivered_tokens == self.charged_tokens,
            "the books balance": self.ledger_ok,
        }

    @property
    def kept(self) -> bool:
        return all(self.promises.values())

    def as_json(self) -> dict[str, Any]:
        return {
            "engine": self.engine,
            "streams": self.streams,
            "evictions": self.evictions,
            "client_resets": self.client_resets,
            "tokens_lost": self.tokens_lost,
            "tokens_duplicated": self.tokens_duplicated,
            "answers_identical": self.answers_identical,
            "texts_differing": self.texts_differing,
            "answers_resumed": self.resumed,
            "resume_gap_ms": percentiles(self.resume_gap_ms),
            "reroute_ms": percentiles(self.reroute_ms),
            "flip_ms": percentiles(self.flip_ms),
            "delivered_tokens": self.delivered_tokens,
            "charged_tokens": self.charged_tokens,
            "ledger_ok": self.ledger_ok,
            "promises": self.promises,
            "errors": self.errors,
            "urls": self.urls,
        }

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(".part")
        unfinished.write_text(json.dumps(self.as_json(), indent=2) + "\n")
        unfinished.replace(path)


def percentiles(values: Sequence[float]) -> dict[str, float | None]:
    """Nearest rank. One value is its own p50 and p99; none gives null rather than an invented zero."""
    if not values:
        return {"p50": None, "p99": None}
    ordered = sorted(values)
    last = ordered[min(len(ordered) - 1, -(-99 * len(ordered) // 100) - 1)]
    return {"p50": round(statistics.median_low(ordered), 3), "p99": round(last, 3)}
