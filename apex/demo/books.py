"""The books of the story in a few lines: what was bought, held, taken, and what is left."""

from __future__ import annotations

from django.db.models import Count, Q, Sum

from brokerage.models import Customer
from ledger.models import Entry, Hold
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
        f"{row['journal__kind']:<14} {row['count']:>4} journals {row['total']:>18} {now.currency}"
        for row in moved
    ]
    holds = Hold.objects.filter(account_id=now.account_id).aggregate(
        made=Count("id"), open=Count("id", filter=Q(state=Hold.State.OPEN))
    )
    lines.append(f"{'holds':<14} {holds['made']:>4} made, {holds['open']} open")
    lines.append(
        f"{'balance':<14} posted {now.posted}, held {now.held}, available {now.available} {now.currency}"
    )
    return lines
