"""Money as text: exact to a billionth, in the API and for people."""

from __future__ import annotations

from decimal import Decimal

from djmoney.money import Money

_API_QUANTUM = Decimal("0.000000001")


def api_money(amount: Decimal, currency: str) -> dict[str, str]:
    """As the API shows it: `{"amount": "12.340000000", "currency": "USD"}`. Never rounds."""
    exact = amount.quantize(_API_QUANTUM)
    if exact != amount:
        raise ValueError(f"{amount} has more than 9 decimals")
    return {"amount": f"{exact:f}", "currency": currency}


def format_money(money: Money) -> str:
    """For people: `12.34 USD`, `0.000000025 USD`. At least two decimals, and every other one that counts.

    django-money prints cents only, so a price of a token would read "$0.00".
    """
    amount = money.amount.normalize()
    decimals = max(2, -int(amount.as_tuple().exponent))
    return f"{amount:,.{decimals}f} {money.currency}"
