"""The queues that people work on, and how well PayPal is taken care of. Constant number of queries."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date, datetime, timedelta

from django.db.models import Count, Min, Q, QuerySet
from django.utils import timezone

from ledger.models import Difference, Dispute, InboundEvent, ParkedRefund, Reconciliation, Refund, Settlement

STUCK_AFTER = timedelta(minutes=10)


@dataclass(frozen=True, slots=True)
class PayPalState:
    """`reconciled_through` is the last day that was compared, None before the first.

    `events_stuck`: one that is not parked has waited for longer than STUCK_AFTER.
    """

    parked_events: int
    waiting_since: datetime | None
    events_stuck: bool
    parked_returns: int
    open_differences: int
    unfinished_refunds: int
    open_disputes: int
    reconciled_through: date | None
    reconciliation_due: bool


def parked_events() -> QuerySet[InboundEvent]:
    """Events that a person has to look at, newest first, without their bytes. See `events.retry_event`."""
    return InboundEvent.objects.filter(parked_at__isnull=False, applied_at__isnull=True).defer("raw")


def parked_returns() -> QuerySet[ParkedRefund]:
    """Money that went back or came back before what it is about was booked."""
    return ParkedRefund.objects.filter(applied_at__isnull=True)


def open_differences() -> QuerySet[Difference]:
    """What PayPal's list and our books disagree on, newest first. See `reconciliation.resolve_difference`."""
    return Difference.objects.filter(resolved_at__isnull=True)


def paypal_state() -> PayPalState:
    """For the health matrix and the first page of the back office."""
    events = InboundEvent.objects.filter(applied_at__isnull=True).aggregate(
        parked=Count("pk", filter=Q(parked_at__isnull=False)),
        since=Min("received_at", filter=Q(parked_at=None) & ~Q(verified=False) & ~Q(channel="paypal.return")),
    )
    last = (
        Reconciliation.objects.filter(provider="paypal")
        .order_by("-day")
        .values_list("day", flat=True)
        .first()
    )
    yesterday = timezone.now().date() - timedelta(days=1)
    # Yesterday's comparison has until noon; before the first payment there is nothing to compare.
    due_day = yesterday if timezone.now().hour >= 12 else yesterday - timedelta(days=1)
    moved = Settlement.objects.filter(provider="paypal", occurred_at__date__lte=due_day)
    return PayPalState(
        parked_events=events["parked"],
        waiting_since=events["since"],
        events_stuck=events["since"] is not None and events["since"] < timezone.now() - STUCK_AFTER,
        parked_returns=parked_returns().count(),
        open_differences=open_differences().count(),
        unfinished_refunds=Refund.objects.filter(state__in=Refund.UNFINISHED).count(),
        open_disputes=Dispute.objects.filter(state=Dispute.State.OPEN).count(),
        reconciled_through=last,
        reconciliation_due=(last is None or last < due_day) and moved.exists(),
    )
