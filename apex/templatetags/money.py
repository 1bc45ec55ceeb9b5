"""Money in templates."""

from __future__ import annotations

from decimal import Decimal

from django import template

register = template.Library()


@register.filter
def money(amount: Decimal, currency: str) -> str:
    """`{{ amount|money:"USD" }}` as people read it."""
    return f"{amount:,.2f} {currency}"
