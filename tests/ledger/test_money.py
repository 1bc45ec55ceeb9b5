"""Small amounts must not read as nothing."""

from __future__ import annotations

from decimal import Decimal

import pytest
from djmoney.money import Money

from ledger.money import api_money, format_money


@pytest.mark.parametrize(
    ("amount", "text"),
    [
        ("12.34", "12.34 USD"),
        ("0.0000001", "0.0000001 USD"),
        ("1E-9", "0.000000001 USD"),
        ("0", "0.00 USD"),
        ("0E-9", "0.00 USD"),
        ("-0.5", "-0.50 USD"),
        ("1E+3", "1,000.00 USD"),
        ("1234567.100000000", "1,234,567.10 USD"),
    ],
)
def test_people_see_every_decimal_that_counts(amount, text):
    assert format_money(Money(amount, "USD")) == text


@pytest.mark.parametrize(
    ("amount", "text"),
    [("12.34", "12.340000000"), ("1E-9", "0.000000001"), ("-1E+2", "-100.000000000"), ("0", "0.000000000")],
)
def test_the_api_shows_nine_decimals(amount, text):
    assert api_money(Decimal(amount), "USD") == {"amount": text, "currency": "USD"}


def test_the_api_never_rounds():
    with pytest.raises(ValueError, match="more than 9 decimals"):
        api_money(Decimal("0.0000000001"), "USD")
