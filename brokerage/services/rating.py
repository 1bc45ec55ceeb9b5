"""What an answer costs. Pure arithmetic, done once per answer and never again on a rounded figure."""

from __future__ import annotations

from decimal import ROUND_HALF_EVEN, Context, Decimal

AMOUNT_PLACES = Decimal("1e-9")
# 10-digit token counts times 24-digit rates, summed: nothing is rounded before the last step.
_EXACT = Context(prec=60, rounding=ROUND_HALF_EVEN)


def rate(
    *, prompt_tokens: int, completion_tokens: int, prompt_rate: Decimal, completion_rate: Decimal
) -> Decimal:
    """Tokens times price per token, half-even at 9 places, in the currency of the rates.

    Grows with each argument, so a hold rated for the most an answer can be always covers its charge.
    Raises ValueError for negative arguments.
    """
    if min(prompt_tokens, completion_tokens) < 0 or min(prompt_rate, completion_rate) < 0:
        raise ValueError("tokens and rates must not be negative")
    exact = _EXACT.add(
        _EXACT.multiply(Decimal(prompt_tokens), prompt_rate),
        _EXACT.multiply(Decimal(completion_tokens), completion_rate),
    )
    return exact.quantize(AMOUNT_PLACES, context=_EXACT)


def rate_answer(
    *, prompt_tokens: int, completion_tokens: int, prompt_rate: Decimal, completion_rate: Decimal
) -> Decimal:
    """As `rate`, but an answer of which nothing was delivered costs nothing, whatever its prompt."""
    if completion_tokens == 0:
        return Decimal(0).quantize(AMOUNT_PLACES)
    return rate(
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        prompt_rate=prompt_rate,
        completion_rate=completion_rate,
    )
