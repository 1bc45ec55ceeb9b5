"""Background work of the books. Each task may run twice, at once, or not at all: beat asks again."""

from __future__ import annotations

from celery import shared_task
from django.db.models.functions import Now

from ledger import proof, services
from ledger.audit import export_heads, seal_events
from ledger.models import InboundEvent
from ledger.paypal import orders
from ledger.paypal.gateway import GatewayUnavailable

SWEEP_LIMIT = 100
EXPIRE_LIMIT = 500


@shared_task(
    name="ledger.tasks.settle_top_up",
    autoretry_for=(GatewayUnavailable,),
    retry_backoff=1,
    max_retries=4,
    # When PayPal stays away the sweep goes on: no stack trace for that.
    throws=(GatewayUnavailable,),
)
def settle_top_up(top_up_id: int, event_id: int | None = None) -> None:
    orders.settle_top_up(top_up_id=top_up_id)
    if event_id is not None:
        InboundEvent.objects.filter(pk=event_id, applied_at__isnull=True).update(applied_at=Now())


@shared_task(name="ledger.tasks.sweep_top_ups")
def sweep_top_ups() -> None:
    """Drives on purchases whose webhook, return page or worker got lost."""
    for top_up_id in orders.unfinished_top_ups(limit=SWEEP_LIMIT):
        settle_top_up.delay(top_up_id)


@shared_task(name="ledger.tasks.expire_holds")
def expire_holds() -> int:
    """Gives back the credit of holds whose time is over; returns how many."""
    expired = 0
    while (batch := services.expire_due_holds(limit=EXPIRE_LIMIT)) > 0:
        expired += batch
        if batch < EXPIRE_LIMIT:
            break
    return expired


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
