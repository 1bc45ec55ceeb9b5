"""Background work of the books. Each task may run twice, at once, or not at all: beat asks again."""

from __future__ import annotations

from datetime import timedelta

from celery import shared_task
from django.utils import timezone

from ledger import proof, services
from ledger.audit import export_heads, seal_events
from ledger.paypal import events, orders, reconciliation, refunds
from ledger.paypal.gateway import GatewayUnavailable

SWEEP_LIMIT = 100
EXPIRE_LIMIT = 500
USAGE_LIMIT = 5000


@shared_task(
    name="ledger.tasks.settle_top_up",
    autoretry_for=(GatewayUnavailable,),
    retry_backoff=1,
    max_retries=4,
    # When PayPal stays away the sweep goes on: no stack trace for that.
    throws=(GatewayUnavailable, orders.PaymentMismatch),
)
def settle_top_up(top_up_id: int) -> None:
    orders.settle_top_up(top_up_id=top_up_id)


@shared_task(name="ledger.tasks.sweep_top_ups")
def sweep_top_ups() -> None:
    """Drives on purchases whose webhook, return page or worker got lost."""
    for top_up_id in orders.unfinished_top_ups(limit=SWEEP_LIMIT):
        settle_top_up.delay(top_up_id)


@shared_task(name="ledger.tasks.apply_event", throws=(GatewayUnavailable,))
def apply_event(event_id: int) -> None:
    """Does what an event is a reason for. When PayPal is away the event itself says when to try again."""
    events.apply_event(event_id=event_id)


@shared_task(name="ledger.tasks.sweep_events")
def sweep_events() -> None:
    """Events whose hint was lost, or whose next try is due."""
    for event_id in events.due_events(limit=SWEEP_LIMIT):
        apply_event.delay(event_id)


@shared_task(name="ledger.tasks.drive_refund", throws=(GatewayUnavailable,))
def drive_refund(refund_id: int) -> None:
    refunds.drive_refund(refund_id=refund_id)


# Many pages of PayPal's list: off the queue before it runs, and with more time than others.
@shared_task(
    name="ledger.tasks.reconcile_paypal",
    acks_late=False,
    time_limit=1800,
    autoretry_for=(GatewayUnavailable,),
    retry_backoff=60,
    max_retries=5,
)
def reconcile_paypal() -> int:
    """Compares the last two days that are over; PayPal may list a movement hours late. Returns the open differences."""
    today = timezone.now().date()
    days = [today - timedelta(days=ago) for ago in (2, 1)]
    return sum(reconciliation.reconcile_day(day=day).differences for day in days)


@shared_task(name="ledger.tasks.sweep_refunds")
def sweep_refunds() -> None:
    """Drives on refunds whose answer or event got lost."""
    for refund_id in refunds.unfinished_refunds(limit=SWEEP_LIMIT):
        drive_refund.delay(refund_id)


@shared_task(name="ledger.tasks.expire_holds")
def expire_holds() -> int:
    """Gives back the credit of holds whose time is over; returns how many."""
    expired = 0
    while (batch := services.expire_due_holds(limit=EXPIRE_LIMIT)) > 0:
        expired += batch
        if batch < EXPIRE_LIMIT:
            break
    return expired


@shared_task(name="ledger.tasks.expire_grants")
def expire_grants() -> int:
    """Books the end of credit grants whose time is over; returns how many."""
    return services.expire_due_grants(limit=EXPIRE_LIMIT)


@shared_task(name="ledger.tasks.recognise_promotions")
def recognise_promotions() -> int:
    """Promised credit that was used becomes an expense."""
    return services.recognise_promotions(limit=EXPIRE_LIMIT)


@shared_task(name="ledger.tasks.advance_totals")
def advance_totals() -> int:
    """Keeps reading the platform's balances short."""
    return services.advance_totals()


@shared_task(name="ledger.tasks.post_usage")
def post_usage() -> int:
    """Books the usage lines that are due; returns how many."""
    posted = 0
    while (batch := services.post_usage(limit=USAGE_LIMIT)) > 0:
        posted += batch
        if batch < USAGE_LIMIT:
            break
    return posted


@shared_task(name="ledger.tasks.seal_audit_events")
def seal_audit_events() -> int:
    """Seals the audit trail and carries the new heads out of the database; returns how many events."""
    sealed = seal_events()
    export_heads()
    return sealed


# Taken off the queue before it runs: it may take longer than the broker waits for an answer.
@shared_task(name="ledger.tasks.verify_books", acks_late=False, time_limit=3600)
def verify_books() -> bool:
    """Proves the books and stores what was found; true when all is well."""
    return proof.store_proof().ok
