"""The two columns every amount has: exact to a billionth, with its currency beside it."""

from __future__ import annotations

from typing import Any

from django.db.models import DecimalField
from djmoney.models.fields import MoneyField

MAX_DIGITS = 24
DECIMAL_PLACES = 9


def money_field(**options: Any) -> MoneyField:
    """Columns `NAME` and `NAME_currency`. The currency is free text here: composite foreign keys tie it."""
    return MoneyField(
        max_digits=MAX_DIGITS,
        decimal_places=DECIMAL_PLACES,
        default_currency=None,
        currency_choices=None,
        **options,
    )


def decimal_field(**options: Any) -> DecimalField:
    """An amount whose currency is told by another column of the same row, or by its account."""
    return DecimalField(max_digits=MAX_DIGITS, decimal_places=DECIMAL_PLACES, **options)
