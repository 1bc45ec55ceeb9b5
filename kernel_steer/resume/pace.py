"""How long a node may be silent: judged by the answer's own rhythm, as no fixed time fits every model."""

from __future__ import annotations

import time
from collections.abc import Callable

from kernel_steer.resume.work import Limits

_GAPS_MIN = 8  # before that there is no rhythm yet
_BLOCK = 100


class Pace:
    """The gaps between the tokens of one leg.

    The largest of the last 100 to 200 gaps stands for their 99th percentile: it costs two numbers.
    """

    def __init__(self, limits: Limits, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits = limits
        self._clock = clock
        self._latest = clock()
        self._tokens = 0
        self._gaps = 0
        self._largest = self._largest_before = 0.0

    def note(self, tokens: int) -> None:
        """`tokens` have come since the last call, perhaps several at once."""
        now = self._clock()
        if self._tokens and tokens:
            self._take((now - self._latest) / tokens, tokens)
        self._tokens += tokens
        self._latest = now

    def _take(self, gap_s: float, count: int) -> None:
        if self._gaps >= _BLOCK:
            self._largest_before, self._largest, self._gaps = self._largest, 0.0, _GAPS_MIN
        self._largest = max(self._largest, gap_s)
        self._gaps += count

    @property
    def silence_max_s(self) -> float:
        """After this long without a sign the node is taken for lost. The first token has the prefill's time."""
        limits = self._limits
        if not self._tokens:
            return limits.head_s
        if self._gaps < _GAPS_MIN:
            return limits.token_gap_s
        own = limits.gap_factor * max(self._largest, self._largest_before)
        return min(max(own, limits.gap_floor_s), limits.head_s)
