"""A refund that somebody of ours decided on: intent, hold, PayPal, proof, booking. Every step may be repeated.

The intent is written before PayPal is called, with the request id that makes the call count once, and the
wallet's credit is held until the outcome is known. PayPal's answer books nothing: the refund is read again
from its API, and that is booked, by the same function that books what webhooks and notifications tell.
"""

from __future__ import annotations

import logging
from datetime import timedelta

from django.db import transaction
from django.db.models import Sum
from django.db.models.functions import Now
from djmoney.money import Money

from ledger import services
from ledger.errors import BadPosting, IdempotencyConflict, InsufficientFunds
from ledger.models import Refund, Settlement, TopUp
from ledger.paypal.disputes import gone_back, hold_what_is_there
from ledger.paypal.gateway import GatewayRefused, GatewayUnavailable, PaymentGateway, Return
from ledger.paypal.locks import lock_capture
from ledger.paypal.rails import gateway
from ledger.paypal.returns import book_return, finish_refund
from ledger.selectors import wallet

logger = logging.getLogger(__name__)

State = Refund.State
HOLD_FOR = timedelta(days=60)
# PayPal remembers a refund's request id for 45 days; after that the call would send the money again.
ASK_AGAIN_WITHIN = timedelta(days=40)
LOOK_AGAIN_AFTER = timedelta(seconds=30)


def start_refund(
    *,
    capture_id: str,
    amount: Money,
    reason: str,
    actor: str,
    idempotency_key: str,
    note_to_payer: str = "",
    allow_debt: bool = False,
    provider: str = "paypal",
) -> Refund:
    """The refund under that key, and PayPal's first answer to it. No transaction may be open.

    What the wallet does not have any more was spent: that is refused with InsufficientFunds unless
    `allow_debt` says that it shall become the customer's debt. Raises Settlement.DoesNotExist, ValueError
    (an amount that PayPal cannot send), BadPosting (more than is left of the capture), IdempotencyConflict.
    PayPal not answering raises nothing: the sweep goes on. Look at `state` and `failure`.
    """
    with transaction.atomic(durable=True):
        refund = intend_refund(
            capture_id=capture_id,
            amount=amount,
            reason=reason,
            actor=actor,
            idempotency_key=idempotency_key,
            note_to_payer=note_to_payer,
            allow_debt=allow_debt,
            provider=provider,
        )
    try:
        return drive_refund(refund_id=refund.pk)
    except GatewayUnavailable as problem:
        logger.warning("%s waits for the sweep: %s", refund, problem)
        refund.refresh_from_db()
        return refund


def intend_refund(
    *,
    capture_id: str,
    amount: Money,
    reason: str,
    actor: str,
    idempotency_key: str,
    note_to_payer: str = "",
    allow_debt: bool = False,
    provider: str = "paypal",
) -> Refund:
    """The refund under that key, written down in the caller's transaction; `drive_refund` or the sweep sends it.

    Raises what `start_refund` does.
    """
    if not reason.strip():
        raise ValueError("a refund needs a reason")
    capture = Settlement.objects.select_related("account", "top_up").get(
        provider=provider, kind="capture", external_id=capture_id
    )
    _rail_of(capture).check_amount(amount)
    lock_capture(provider=provider, capture_id=capture_id)
    refund = Refund.objects.filter(idempotency_key=idempotency_key).first()
    if refund is None:
        return _write_intent(capture, amount, reason, actor, idempotency_key, note_to_payer, allow_debt)
    if (refund.capture_id, refund.amount) != (capture.pk, amount):
        raise IdempotencyConflict(
            f"refund {idempotency_key!r} exists with another capture or amount",
            fields=["capture", "amount"],
        )
    return refund


def _write_intent(
    capture: Settlement, amount: Money, reason: str, actor: str, key: str, note: str, allow_debt: bool
) -> Refund:
    if str(amount.currency) != str(capture.gross.currency):
        raise BadPosting(
            f"capture {capture.external_id} is in {capture.gross.currency!s}, not in {amount.currency}"
        )
    under_way = Refund.objects.filter(capture=capture, state__in=Refund.UNFINISHED).aggregate(
        total=Sum("amount", default=0)
    )["total"]
    left = (
        capture.gross.amount
        - gone_back(provider=capture.provider, capture_id=capture.external_id)
        - under_way
    )
    if amount.amount > left:
        raise BadPosting(
            f"{amount.amount} is more than the {left.normalize():f} {amount.currency} that can still be refunded"
            f" of capture {capture.external_id}"
        )
    available = wallet(capture.account.code).available
    if not allow_debt and available is not None and available < amount.amount:
        raise InsufficientFunds(
            f"the wallet has {available.normalize():f} {amount.currency} left: the rest was spent",
            available=available,
            required=amount.amount,
            shortfall=amount.amount - available,
        )
    refund = Refund(
        capture=capture, account=capture.account, amount=amount, idempotency_key=key,
        reason=reason[:500], note_to_payer=note[:200], actor=actor,
    )  # fmt: skip
    refund.hold_id = hold_what_is_there(
        account=capture.account, amount=amount, key=f"refund:{refund.public_id}", ttl=HOLD_FOR
    )
    refund.save()
    services.record_audit_event(
        actor=actor,
        action="refund.start",
        object_type="refund",
        object_id=str(refund.public_id),
        after={"capture": capture.external_id, "amount": str(amount.amount), "reason": refund.reason,
               "allow_debt": allow_debt},
    )  # fmt: skip
    return refund


def drive_refund(*, refund_id: int) -> Refund:
    """Asks PayPal for the refund if it has not been, then reads it and books what it says.

    Safe to call at any time and by many at once. Raises GatewayUnavailable.
    """
    refund = Refund.objects.select_related("capture__top_up", "capture__account").get(pk=refund_id)
    if refund.state not in Refund.UNFINISHED:
        return refund
    capture = refund.capture
    rail = _rail_of(capture)
    try:
        if refund.external_id is None:
            told = _find(rail, refund) or _send(rail, refund)
            # Kept before anything else: from now on it is read, not asked for.
            Refund.objects.filter(pk=refund.pk, external_id__isnull=True).update(
                external_id=told.external_id, changed_at=Now()
            )
        else:
            told = rail.read_return(refund.external_id)
        told = rail.read_return(told.external_id)
    except GatewayRefused as refusal:
        finish_refund(refund, State.FAILED, failure=str(refusal))
    else:
        book_return(provider=capture.provider, told=told)
    refund.refresh_from_db()
    return refund


def _send(rail: PaymentGateway, refund: Refund) -> Return:
    if Refund.objects.filter(pk=refund.pk, created_at__lt=Now() - ASK_AGAIN_WITHIN).exists():
        raise GatewayRefused("TOO_LATE_TO_REPEAT", "PayPal has forgotten the request's id; start another")
    return rail.refund_capture(
        refund.capture.external_id,
        amount=refund.amount,
        reference=str(refund.public_id),
        request_id=str(refund.request_id),
        note=refund.note_to_payer,
    )


def _find(rail: PaymentGateway, refund: Refund) -> Return | None:
    """The refund among those of the order, when an earlier call had an effect but no answer."""
    if not Refund.objects.filter(pk=refund.pk, created_at__lt=Now() - LOOK_AGAIN_AFTER).exists():
        return None
    try:
        refund_ids = rail.read_order(refund.capture.order_id).refund_ids
    except GatewayRefused:  # PayPal does not show the order any more: the request's id has to do
        return None
    for external_id in refund_ids:
        told = rail.read_return(external_id)
        if told.reference == str(refund.public_id):
            return told
    return None


def unfinished_refunds(*, limit: int) -> list[int]:
    """Claims those that nothing happened to for a while, the longest first: their ids."""
    due = Refund.objects.filter(state__in=Refund.UNFINISHED, changed_at__lt=Now() - LOOK_AGAIN_AFTER)
    with transaction.atomic():
        ids = list(
            due.order_by("changed_at")
            .select_for_update(skip_locked=True, no_key=True)
            .values_list("pk", flat=True)[:limit]
        )
        Refund.objects.filter(pk__in=ids).update(changed_at=Now())
    return ids


def _rail_of(capture: Settlement) -> PaymentGateway:
    top_up: TopUp | None = capture.top_up
    return gateway(top_up.rail if top_up is not None else "orders")
