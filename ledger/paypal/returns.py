"""Money of a capture that moved later: refund, reversal, reversal cancelled. Booked once, whatever told of it."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from django.db import transaction
from django.db.models import Q
from django.db.models.functions import Now
from djmoney.money import Money

from ledger import services
from ledger.models import Refund, Settlement
from ledger.paypal.conversion import book_conversion
from ledger.paypal.disputes import holds_released
from ledger.paypal.gateway import Return, ReturnKind, ReturnStatus

ACTOR = "system:paypal"


def book_return(*, provider: str, told: Return) -> None:
    """Books what moved, and moves the request of ours that it answers. A pending one moves nothing.

    Raises IdempotencyConflict when it was booked with other figures, BadPosting when it exceeds its capture.
    """
    if told.status is ReturnStatus.PENDING:
        _note(told, Refund.State.PENDING)
        return
    money = Money(told.gross, told.currency)
    facts: dict[str, Any] = {
        "provider": provider,
        "external_id": told.external_id,
        "capture_id": told.capture_id,
        "amount": money,
        "fee": told.fee,
        "actor": ACTOR,
        "effective_at": told.occurred_at,
    }
    with holds_released(provider=provider, capture_id=told.capture_id):
        if told.status is ReturnStatus.FAILED:
            if _is_booked(provider, told):
                services.settle_recovery(kind="refund_failed", **facts)
                _convert(provider, told, back=True)
            _note(told, Refund.State.FAILED)
        elif told.kind is ReturnKind.REVERSAL_CANCELLED:
            services.settle_recovery(kind=told.kind.value, **facts)
        else:
            _note(told, Refund.State.COMPLETED)
            services.settle_refund(kind=told.kind.value, **facts)
            _convert(provider, told, back=False)


def _convert(provider: str, told: Return, *, back: bool) -> None:
    """PayPal pays a refund out of our own currency, and puts it back there when it did not arrive."""
    if told.converted is None:
        return
    theirs = Money(told.gross - told.fee, told.currency)
    left, came = (theirs, told.converted) if back else (told.converted, theirs)
    key = f"{provider}.{'refund_failed' if back else 'refund'}:{told.external_id}"
    book_conversion(key=key, left=left, came=came, at=told.occurred_at, actor=ACTOR)


def _is_booked(provider: str, told: Return) -> bool:
    return Settlement.objects.filter(
        provider=provider, external_id=told.external_id, kind__in=["refund", "reversal"]
    ).exists()


def _note(told: Return, state: Refund.State) -> None:
    """What PayPal says of a refund, for the request that asked for it: its hold ends with it."""
    mine = Q(external_id=told.external_id)
    if _is_uuid(told.reference):
        mine |= Q(public_id=told.reference)
    for refund in Refund.objects.filter(mine):
        if state in Refund.UNFINISHED:
            Refund.objects.filter(pk=refund.pk, state=Refund.State.STARTED).update(
                state=state, external_id=told.external_id, changed_at=Now()
            )
        else:
            failure = "PayPal did not send it, or took it back" if state == Refund.State.FAILED else ""
            finish_refund(refund, state, external_id=told.external_id, failure=failure)


def finish_refund(
    refund: Refund, state: Refund.State, *, external_id: str | None = None, failure: str = ""
) -> None:
    """Ends a request and gives its held credit free. A completed one may fail later, nothing else moves it."""
    fields: dict[str, Any] = {"state": state, "failure": failure[:200], "changed_at": Now()}
    if external_id is not None:
        fields["external_id"] = external_id
    before = (
        [*Refund.UNFINISHED, Refund.State.COMPLETED]
        if state == Refund.State.FAILED
        else [*Refund.UNFINISHED, Refund.State.FAILED]
    )
    with transaction.atomic():
        if refund.hold_id is not None:
            services.void_hold(hold_id=refund.hold_id)
        if Refund.objects.filter(pk=refund.pk, state__in=before).exclude(state=state).update(**fields):
            services.record_audit_event(
                actor=ACTOR,
                action=f"refund.{state}",
                object_type="refund",
                object_id=str(refund.public_id),
                after={"external_id": external_id, "failure": failure[:200]},
            )


def _is_uuid(text: str) -> bool:
    try:
        UUID(text)
    except ValueError:
        return False
    return True
