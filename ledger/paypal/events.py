"""What PayPal tells us, by webhook, by notification or by sending the payer back: a reason to look, no more.

Every event is stored before anything is done about it. `apply_event` looks up the truth and books that; it
may run twice, at once or late. What cannot be applied is parked with its reason, for a person and
`retry_event`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from uuid import UUID

from django.db import transaction
from django.db.models import F, Q
from django.db.models.functions import Now

from ledger.errors import LedgerError
from ledger.models import InboundEvent, TopUp
from ledger.paypal import disputes, returns
from ledger.paypal.gateway import GatewayRefused, GatewayUnavailable, ReturnKind
from ledger.paypal.ipn import inbox
from ledger.paypal.ipn.message import Malformed, read_message
from ledger.paypal.ipn.rail import CHANNEL as IPN
from ledger.paypal.ipn.rail import PAYMENT_STATES, RETURN_STATES, return_of
from ledger.paypal.orders import settle_top_up
from ledger.paypal.rails import gateway
from ledger.paypal.signature import check_signature
from ledger.paypal.store import hint, store_event
from ledger.paypal.subjects import About, subject_of
from ledger.services import record_audit_event

logger = logging.getLogger(__name__)

WEBHOOK = "paypal.webhook"
RETURN = "paypal.return"
PROVIDER = "paypal"
# PayPal away: tried again after 5 s, 10 s, 20 s ... at most an hour; parked after about two days.
FIRST_RETRY_S, LONGEST_RETRY_S, MAX_ATTEMPTS = 5, 3600, 55


class Unmatched(Exception):
    """Verified, but about money that no purchase of ours explains."""


def note_webhook(*, raw: bytes, headers: Mapping[str, str]) -> InboundEvent:
    """Stores a webhook that PayPal signed. Raises signature.Forged and signature.Undecided: nothing is stored."""
    check_signature(raw=raw, headers=headers)
    return store_event(
        channel=WEBHOOK, raw=raw, headers=headers, about=subject_of(raw).external_id, verified=True
    )


def note_return(*, order_id: str) -> InboundEvent:
    """The payer came back from PayPal with this order id (`token` in the query): each time a reason to look."""
    with transaction.atomic():
        event = store_event(channel=RETURN, raw=order_id.encode(), about=order_id, verified=None)
        InboundEvent.objects.filter(pk=event.pk).update(applied_at=None, parked_at=None)
    return event


def apply_event(*, event_id: int) -> None:
    """Looks up what the event is about and books it. Raises GatewayUnavailable after noting the next try."""
    event = InboundEvent.objects.get(pk=event_id)
    if event.applied_at is not None or event.parked_at is not None:
        return
    waiting = InboundEvent.objects.filter(pk=event.pk, applied_at__isnull=True)
    try:
        _APPLY[event.channel](event)
    except GatewayUnavailable as problem:
        attempts = event.attempts + 1
        if attempts >= MAX_ATTEMPTS:
            _park(event, f"given up after {attempts} attempts: {problem}")
            return
        wait = timedelta(seconds=min(FIRST_RETRY_S * 2 ** min(event.attempts, 12), LONGEST_RETRY_S))
        waiting.update(attempts=F("attempts") + 1, due_at=Now() + wait, error=str(problem)[:500])
        raise
    except (GatewayRefused, LedgerError, Unmatched, Malformed) as problem:
        _park(event, str(problem))
    else:
        waiting.update(applied_at=Now(), error="")


def retry_event(*, event_id: int, actor: str) -> InboundEvent:
    """Takes a parked event out of the queue and has it applied again. Raises ValueError when it is not parked."""
    with transaction.atomic():
        moved = InboundEvent.objects.filter(
            pk=event_id, parked_at__isnull=False, applied_at__isnull=True
        ).update(parked_at=None, attempts=0, due_at=Now(), error="")
        if not moved:
            raise ValueError(f"event {event_id} is not parked")
        record_audit_event(
            actor=actor,
            action="paypal.event_retried",
            object_type="inbound_event",
            object_id=str(event_id),
        )
        transaction.on_commit(lambda: hint(event_id))
    return InboundEvent.objects.get(pk=event_id)


def dismiss_event(*, event_id: int, reason: str, actor: str) -> InboundEvent:
    """Closes a parked event that nothing has to be booked for. Raises ValueError."""
    if not reason.strip():
        raise ValueError("a dismissed event needs a reason")
    with transaction.atomic():
        moved = InboundEvent.objects.filter(
            pk=event_id, parked_at__isnull=False, applied_at__isnull=True
        ).update(parked_at=None, applied_at=Now(), error=f"dismissed by {actor}: {reason}"[:500])
        if not moved:
            raise ValueError(f"event {event_id} is not parked")
        record_audit_event(
            actor=actor,
            action="paypal.event_dismissed",
            object_type="inbound_event",
            object_id=str(event_id),
            after={"reason": reason[:300]},
        )
    return InboundEvent.objects.get(pk=event_id)


def due_events(*, limit: int) -> list[int]:
    """Events whose hint was lost, or whose next try is due; the longest waiting first."""
    believed = Q(verified=True) | Q(verified__isnull=True, channel=IPN)
    return list(
        InboundEvent.objects.filter(
            believed, applied_at__isnull=True, parked_at__isnull=True, due_at__lt=Now() - timedelta(seconds=5)
        )
        .order_by("due_at")
        .values_list("pk", flat=True)[:limit]
    )


def _apply_webhook(event: InboundEvent) -> None:
    if not event.verified:
        raise Unmatched("its signature was never checked")
    subject = subject_of(bytes(event.raw))
    if subject.about is About.PURCHASE:
        top_up_id = _purchase(order_id=subject.order_id, reference=subject.reference)
        if top_up_id is not None:
            settle_top_up(top_up_id=top_up_id)
        elif subject.took_money:
            raise Unmatched(f"PayPal took capture {subject.external_id}, which no purchase of ours asked for")
    elif subject.about is About.RETURN:
        told = gateway("orders").read_return(subject.external_id)
        if subject.reversed:
            told = replace(told, kind=ReturnKind.REVERSAL)
        returns.book_return(provider=PROVIDER, told=told)
    elif subject.about is About.DISPUTE:
        disputes.settle_dispute(dispute_id=subject.external_id)


def _apply_return(event: InboundEvent) -> None:
    top_up_id = _purchase(order_id=event.about)
    if top_up_id is not None:
        settle_top_up(top_up_id=top_up_id)


def _apply_ipn(event: InboundEvent) -> None:
    if not inbox.vouch(event):
        return
    message = read_message(bytes(event.raw))
    if message.payment_status in RETURN_STATES:
        returns.book_return(provider=PROVIDER, told=return_of(message))
    elif message.payment_status in PAYMENT_STATES:
        top_up_id = _purchase(reference=message.reference)
        if top_up_id is not None:
            settle_top_up(top_up_id=top_up_id)
        elif message.payment_status == "Completed":
            raise Unmatched(f"PayPal took payment {message.txn_id}, which no purchase of ours asked for")
    elif message.case_id:
        disputes.settle_dispute(dispute_id=message.case_id)
    elif message.payment_status:
        raise Unmatched(f"PayPal has a payment status that is not known here: {message.payment_status}")


_APPLY = {WEBHOOK: _apply_webhook, RETURN: _apply_return, IPN: _apply_ipn}


def _purchase(*, order_id: str = "", reference: str = "") -> int | None:
    """Our purchase by PayPal's order id, else by our own id that PayPal carries for us."""
    if order_id:
        found = TopUp.objects.filter(order_id=order_id).values_list("pk", flat=True).first()
        if found is not None:
            return found
    try:
        public_id = UUID(reference)
    except ValueError:
        return None
    return TopUp.objects.filter(public_id=public_id).values_list("pk", flat=True).first()


def _park(event: InboundEvent, why: str) -> None:
    logger.warning("event %s is parked: %s", event.pk, why)
    InboundEvent.objects.filter(pk=event.pk, applied_at__isnull=True).update(
        parked_at=Now(), error=why[:500], attempts=F("attempts") + 1
    )
