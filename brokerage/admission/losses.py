"""What the platform lost on an answer because nodes went away: tokens that were read or generated again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kernel_steer.admission import LegReport
from kernel_steer.resume.work import WARMED


def with_losses(legs: Sequence[LegReport]) -> Iterator[tuple[LegReport, int, str]]:
    """Each leg with the tokens that it repeated, and the node whose going made that necessary.

    A leg that follows another one reads prompt and answer so far again, or generates them again (replay):
    either way these are its prompt tokens. A standby's look at the prompt is lost altogether.
    """
    before: LegReport | None = None
    for leg in sorted(legs, key=lambda leg: leg.number):
        if before is None:
            lost = 0
        elif leg.ended == WARMED:
            lost = leg.prompt_tokens + leg.completion_tokens
        else:
            lost = leg.prompt_tokens
        yield leg, lost, before.node if before is not None and lost else ""
        if leg.ended != WARMED:
            before = leg
