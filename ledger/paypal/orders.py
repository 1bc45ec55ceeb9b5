"""A purchase of credit: intent, order, approval, capture, booking. Every step may be repeated.

A crash after any line loses nothing: the intent row is written before PayPal is called, the request ids
in it make each call count once, and the sweep drives on whatever is unfinished.
"""

from __future__ import annotations

import logging
from datetime import timedelta

from django.conf import settings
from django.db import connection, transaction
from django.db.models.functions import Now
from djmoney.money import Money

from ledger.errors import IdempotencyConflict, LedgerError, translated
from ledger.models import Account, TopUp
from ledger.paypal import disputes
from ledger.paypal.conversion import book_conversion
from ledger.paypal.gateway import (
    Capture,
    CaptureStatus,
    GatewayRefused,
    GatewayUnavailable,
    Order,
    OrderStatus,
    PaymentGateway,
)
from ledger.paypal.locks import lock_capture
from ledger.paypal.rails import gateway
from ledger.services import platform_account

logger = logging.getLogger(__name__)

State = TopUp.State
ACTOR = "system:paypal"
# PayPal keeps an unpaid order for hours; after this nobody will come back to it.
GIVE_UP_AFTER = timedelta(hours=24)
# A top-up is looked at again when nothing happened to it for this long.
LOOK_AGAIN_AFTER = timedelta(seconds=30)


class PaymentMismatch(LedgerError):
    """Somebody paid, but not what the purchase asks for. Nothing is credited; a person has to look."""


def start_top_up(
    *, wallet_code: str, amount: Money, actor: str, idempotency_key: str, return_url: str, cancel_url: str
) -> TopUp:
    """The purchase under that key; `approve_url` is where the payer agrees. No transaction may be open.

    Raises ValueError (amount that PayPal cannot take), Account.DoesNotExist, IdempotencyConflict,
    GatewayRefused, and GatewayUnavailable: then the same call again goes on where this one stopped.
    """
    rail = gateway(settings.PAYPAL_RAIL)
    rail.check_amount(amount)
    account = Account.objects.get(code=wallet_code)
    if account.currency != str(amount.currency):
        raise ValueError(f"the wallet is in {account.currency}, not in {amount.currency}")
    intent = TopUp(
        rail=rail.rail,
        account=account,
        amount=amount,
        idempotency_key=idempotency_key,
        return_url=return_url,
        cancel_url=cancel_url,
        actor=actor,
    )
    with transaction.atomic(durable=True):
        TopUp.objects.bulk_create([intent], ignore_conflicts=True)
    top_up = TopUp.objects.get(idempotency_key=idempotency_key)
    if top_up.account_id != account.pk or top_up.amount != amount:
        raise IdempotencyConflict(
            f"top-up {idempotency_key!r} exists with another wallet or amount", fields=["wallet", "amount"]
        )
    if top_up.order_id is None:
        _place_order(gateway(top_up.rail), top_up)
    return top_up


def _place_order(rail: PaymentGateway, top_up: TopUp) -> None:
    try:
        order = rail.create_order(
            amount=top_up.amount,
            reference=str(top_up.public_id),
            request_id=str(top_up.create_request_id),
            return_url=top_up.return_url,
            cancel_url=top_up.cancel_url,
        )
    except GatewayRefused as refusal:
        _move(top_up, State.FAILED, failure=str(refusal))
        raise
    TopUp.objects.filter(pk=top_up.pk, order_id__isnull=True).update(
        state=State.APPROVING, order_id=order.order_id, approve_url=order.approve_url, changed_at=Now()
    )
    top_up.refresh_from_db()


def settle_top_up(*, top_up_id: int) -> TopUp:
    """Reads the truth from PayPal, captures what is approved, books what is captured: once.

    Safe to call at any time and by many at once. Raises GatewayUnavailable and PaymentMismatch.
    """
    top_up = TopUp.objects.select_related("account").get(pk=top_up_id)
    if top_up.state == State.SETTLED:
        return top_up
    if top_up.order_id is None:
        # The payer never saw an address, so nothing can have been paid.
        if _is_over(top_up):
            _move(top_up, State.FAILED, failure="the order was never placed")
        return top_up
    rail = gateway(top_up.rail)
    try:
        order = _captured_order(rail, top_up)
    except GatewayRefused as refusal:
        # Not the last word: a later event about the order has it looked at again.
        _move(top_up, State.FAILED, failure=str(refusal))
        return top_up
    if order.reference != str(top_up.public_id):
        raise GatewayUnavailable(f"order {order.order_id} of PayPal is not for {top_up}")
    _apply(top_up, order)
    return top_up


def _captured_order(rail: PaymentGateway, top_up: TopUp) -> Order:
    """The order as it stands, after its capture where the payer has agreed."""
    assert top_up.order_id is not None
    order = rail.read_order(top_up.order_id)
    if order.status is not OrderStatus.APPROVED:
        return order
    try:
        return rail.capture_order(top_up.order_id, request_id=str(top_up.capture_request_id))
    except GatewayRefused as refusal:
        if refusal.issue not in {"ORDER_ALREADY_CAPTURED", "ORDER_NOT_APPROVED"}:
            raise
        # Somebody was faster, or the payer took the approval back: look again.
        return rail.read_order(top_up.order_id)


def _apply(top_up: TopUp, order: Order) -> None:
    for capture in order.captures:
        if capture.status is CaptureStatus.COMPLETED:
            try:
                book_capture(top_up=top_up, order_id=order.order_id, capture=capture)
            except PaymentMismatch as mismatch:
                _move(top_up, State.FAILED, failure=str(mismatch))
                raise
    top_up.refresh_from_db()
    if top_up.state == State.SETTLED:
        return
    statuses = {capture.status for capture in order.captures}
    if CaptureStatus.PENDING in statuses:
        _move(top_up, State.PENDING)
    elif CaptureStatus.FAILED in statuses:
        _move(top_up, State.FAILED, failure="PayPal declined the payment")
    elif order.status is OrderStatus.VOID:
        _move(top_up, State.FAILED, failure="the order was cancelled")
    elif _is_over(top_up):
        _move(top_up, State.FAILED, failure="the payer did not agree in time")


def book_capture(*, top_up: TopUp, order_id: str, capture: Capture) -> None:
    """Books a completed capture if it is what the purchase asked for. Raises PaymentMismatch."""
    if (capture.gross, capture.currency) != (top_up.amount.amount, str(top_up.amount.currency)):
        raise PaymentMismatch(
            f"capture {capture.external_id} paid {capture.gross.normalize():f} {capture.currency} for {top_up}"
            f" of {top_up.amount.amount.normalize():f} {top_up.amount.currency}"
        )
    settle_capture(provider=gateway(top_up.rail).provider, top_up=top_up, order_id=order_id, capture=capture)


def settle_capture(*, provider: str, top_up: TopUp, order_id: str, capture: Capture) -> None:
    """Books gross, fee and net of one capture, once whatever told us of it (SQL: settle_apply).

    Raises IdempotencyConflict when that capture was booked with other figures.
    """
    currency = capture.currency
    clearing = platform_account(code="paypal_clearing", currency=currency)
    fees = platform_account(code="processor_fees", currency=currency)
    with transaction.atomic(), translated(), connection.cursor() as cursor:
        lock_capture(provider=provider, capture_id=capture.external_id)
        cursor.execute(
            "SELECT settlement_id, replayed FROM settle_apply(%s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s)",
            [
                provider,
                "capture",
                capture.external_id,
                order_id,
                top_up.pk,
                top_up.account_id,
                clearing.pk,
                fees.pk,
                currency,
                capture.gross,
                capture.fee,
                ACTOR,
                capture.captured_at,
            ],
        )
        row = cursor.fetchone()
        if capture.converted is not None:
            net = Money(capture.gross - capture.fee, currency)
            key = f"{provider}.capture:{capture.external_id}"
            book_conversion(key=key, left=net, came=capture.converted, at=capture.captured_at, actor=ACTOR)
        disputes.adjust_holds(provider=provider, capture_id=capture.external_id)
    if row is not None and not row[1]:
        logger.info("%s settled: capture %s, %s %s", top_up, capture.external_id, capture.gross, currency)


def unfinished_top_ups(*, limit: int) -> list[int]:
    """Claims those that nothing happened to for a while, the longest first: their ids."""
    due = TopUp.objects.filter(state__in=TopUp.UNFINISHED, changed_at__lt=Now() - LOOK_AGAIN_AFTER)
    with transaction.atomic():
        ids = list(
            due.order_by("changed_at")
            .select_for_update(skip_locked=True, no_key=True)
            .values_list("pk", flat=True)[:limit]
        )
        TopUp.objects.filter(pk__in=ids).update(changed_at=Now())
    return ids


def _is_over(top_up: TopUp) -> bool:
    return TopUp.objects.filter(pk=top_up.pk, created_at__lt=Now() - GIVE_UP_AFTER).exists()


def _move(top_up: TopUp, state: TopUp.State, failure: str = "") -> None:
    """To another state, unless the money has arrived meanwhile: settled is final."""
    TopUp.objects.filter(pk=top_up.pk).exclude(state=State.SETTLED).exclude(
        state=state, failure=failure[:200]
    ).update(state=state, failure=failure[:200], changed_at=Now())
    top_up.refresh_from_db()
