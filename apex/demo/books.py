"""The books of the story in a few lines: what was bought, held, taken, and what is left."""

from __future__ import annotations

from decimal import Decimal

from django.db.models import Count, Q, Sum
from djmoney.money import Money

from brokerage.models import Customer
from ledger.models import Entry, Hold
from ledger.money import format_money
from ledger.selectors import wallet


def summarise(customer_id: str) -> list[str]:
    customer = Customer.objects.get(pk=customer_id)
    now = wallet(customer.wallet_code)
    moved = (
        Entry.objects.filter(account_id=now.account_id)
        .values("journal__kind")
        .annotate(count=Count("id"), total=Sum("amount"))
        .order_by("journal__kind")
    )
    lines = [
        f"{row['journal__kind']:<14} {row['count']:>4} journals {_money(row['total'], now.currency):>20}"
        for row in moved
    ]
    holds = Hold.objects.filter(account_id=now.account_id).aggregate(
        made=Count("id"), open=Count("id", filter=Q(state=Hold.State.OPEN))
    )
    lines.append(f"{'holds':<14} {holds['made']:>4} made, {holds['open']} open")
    posted, held, available = (
        _money(amount, now.currency) for amount in (now.posted, now.held, now.available)
    )
    lines.append(f"{'balance':<14} posted {posted}, held {held}, available {available}")
    return lines


def _money(amount: Decimal, currency: str) -> str:
    return format_money(Money(amount, currency))
