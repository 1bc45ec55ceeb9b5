"""What a measurement says."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class Result:
    door: str  # ports or api
    engine: str
    flows: int
    flips: int
    flip_us: list[float]
    reroute_ms: list[float]
    client_resets: int = 0
    bytes_lost: int = 0
    bytes_duplicated: int = 0

    def as_json(self) -> dict[str, Any]:
        return {
            "engine": self.engine,
            "door": self.door,
            "flows": self.flows,
            "flips": self.flips,
            "flip_us": percentiles(self.flip_us),
            "reroute_ms": percentiles(self.reroute_ms) | {"max": round(max(self.reroute_ms), 3)},
            "client_resets": self.client_resets,
            "bytes_lost": self.bytes_lost,
            "bytes_duplicated": self.bytes_duplicated,
        }


def percentiles(values: Sequence[float]) -> dict[str, float]:
    ordered = sorted(values)
    last = ordered[min(len(ordered) - 1, -(-99 * len(ordered) // 100) - 1)]
    return {"p50": round(statistics.median(ordered), 3), "p99": round(last, 3)}
