"""Money and the words of the books in templates."""

from __future__ import annotations

from decimal import Decimal

from django import template
from djmoney.money import Money

from ledger.money import format_money
from ledger.wording import describe

register = template.Library()


@register.filter
def money(amount: Decimal, currency: str) -> str:
    """`{{ amount|money:"USD" }}`: exact, with two places at least: 1,234.50 USD, 0.000033 USD."""
    return format_money(Money(amount, currency))


@register.filter
def journal_kind(kind: str, lines: int = 1) -> str:
    """`{{ entry.kind|journal_kind:entry.lines }}`: what a journal was about, in the customer's words."""
    return describe(kind, lines)
