"""Complaints of payers. While one may be lost, the disputed credit is held; what moves is booked elsewhere.

The truth is PayPal's dispute, read from its API, whatever event spoke of it. The hold follows from it and
from the books alone: the disputed amount less what went back of that capture already, as far as the wallet
has it. So it does not matter in which order dispute, reversal and refund become known.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

from django.db import transaction
from django.db.models import Case, F, Sum, When
from django.db.models.functions import Now
from djmoney.money import Money

from ledger import services
from ledger.errors import InsufficientFunds
from ledger.models import Account, Dispute, Hold, Settlement
from ledger.paypal.api import ask_more
from ledger.paypal.gateway import GatewayUnavailable
from ledger.paypal.locks import lock_capture
from ledger.selectors import wallet

ACTOR = "system:paypal"
PROVIDER = "paypal"
# Longer than any dispute; each event about it makes the hold anew.
HOLD_FOR = timedelta(days=400)
_TAKEN = ("refund", "reversal")
_CAME_BACK = ("reversal_cancelled", "refund_failed")
# PayPal paid, or the buyer gave up: nothing is taken from us.
_OUTCOMES = {
    "RESOLVED_BUYER_FAVOUR": Dispute.State.LOST,
    "ACCEPTED": Dispute.State.LOST,
    "RESOLVED_SELLER_FAVOUR": Dispute.State.WON,
    "RESOLVED_WITH_PAYOUT": Dispute.State.WON,
    "CANCELED_BY_BUYER": Dispute.State.WON,
    "DENIED": Dispute.State.WON,
    "NONE": Dispute.State.WON,
}


@dataclass(frozen=True, slots=True)
class DisputeFacts:
    """A dispute as PayPal tells it. `capture_id` is the disputed payment's."""

    external_id: str
    capture_id: str
    currency: str
    amount: Decimal
    state: str
    stage: str
    reason: str
    outcome: str
    opened_at: datetime
    told_at: datetime


def read_dispute(dispute_id: str) -> DisputeFacts:
    """Raises GatewayUnavailable and GatewayRefused."""
    answer = ask_more(lambda api: api.get_dispute(dispute_id))
    try:
        return _facts(answer)
    except (KeyError, IndexError, TypeError, ValueError, ArithmeticError):
        raise GatewayUnavailable(f"PayPal tells of dispute {dispute_id} in an unknown form") from None


def _facts(answer: dict[str, Any]) -> DisputeFacts:
    outcome = answer.get("dispute_outcome") or {}
    code = outcome.get("outcome_code", "")
    state = Dispute.State.OPEN
    amount = answer["dispute_amount"]
    if answer["status"] == "RESOLVED":
        state = _OUTCOMES.get(code, Dispute.State.LOST)
        if state == Dispute.State.LOST and outcome.get("amount_refunded"):
            amount = outcome["amount_refunded"]
    return DisputeFacts(
        external_id=answer["dispute_id"],
        capture_id=answer["disputed_transactions"][0]["seller_transaction_id"],
        currency=amount["currency_code"],
        amount=Decimal(amount["value"]),
        state=state,
        stage=answer.get("dispute_life_cycle_stage", ""),
        reason=answer.get("reason", ""),
        outcome=code,
        opened_at=_moment(answer["create_time"]),
        told_at=_moment(answer["update_time"]),
    )


def settle_dispute(*, dispute_id: str) -> Dispute:
    """Reads the dispute from PayPal, stores its state and makes the hold fit. May run at any time.

    Raises GatewayUnavailable and GatewayRefused.
    """
    facts = read_dispute(dispute_id)
    told = {
        "capture_id": facts.capture_id,
        "amount": Money(facts.amount, facts.currency),
        "state": facts.state,
        "stage": facts.stage[:60],
        "reason": facts.reason[:100],
        "outcome": facts.outcome[:100],
        "told_at": facts.told_at,
    }
    with transaction.atomic():
        lock_capture(provider=PROVIDER, capture_id=facts.capture_id)
        Dispute.objects.bulk_create(
            [Dispute(provider=PROVIDER, external_id=facts.external_id, opened_at=facts.opened_at, **told)],
            ignore_conflicts=True,
        )
        dispute = Dispute.objects.select_for_update(no_key=True).get(
            provider=PROVIDER, external_id=facts.external_id
        )
        before = {"state": dispute.state, "outcome": dispute.outcome}
        # Read before another, applied after it: what was read later counts.
        if dispute.told_at <= facts.told_at:
            for name, value in told.items():
                setattr(dispute, name, value)
            dispute.changed_at = Now()
            dispute.save(update_fields=[*told, "changed_at"])
        adjust_holds(provider=PROVIDER, capture_id=facts.capture_id)
        dispute.refresh_from_db()
        after = {"state": dispute.state, "outcome": dispute.outcome}
        services.record_audit_event(
            actor=ACTOR,
            action="paypal.dispute_told",
            object_type="dispute",
            object_id=dispute.external_id,
            before=before,
            after=after,
        )
    return dispute


@contextmanager
def holds_released(*, provider: str, capture_id: str) -> Iterator[None]:
    """Gives the held credit of the capture's disputes free for a booking, and holds anew what is left of it."""
    with transaction.atomic():
        lock_capture(provider=provider, capture_id=capture_id)
        for dispute in _of(provider, capture_id):
            if dispute.hold_id is not None:
                services.void_hold(hold_id=dispute.hold_id)
        yield
        adjust_holds(provider=provider, capture_id=capture_id)


def adjust_holds(*, provider: str, capture_id: str) -> None:
    """Makes the holds of the capture's disputes fit. In a transaction, after `lock_capture`."""
    disputes = _of(provider, capture_id)
    if not disputes:
        return
    account = (
        Account.objects.filter(
            settlements__provider=provider, settlements__kind="capture", settlements__external_id=capture_id
        )
        .order_by()
        .first()
    )
    if account is None:
        return  # the capture is not booked yet: booking it comes here again
    gone = gone_back(provider=provider, capture_id=capture_id)
    for dispute in disputes:
        wanted = Decimal(0)
        if dispute.state != Dispute.State.WON:
            wanted = max(Decimal(0), dispute.amount.amount - gone)
        _hold(dispute, account, wanted)


def _of(provider: str, capture_id: str) -> list[Dispute]:
    return list(
        Dispute.objects.select_for_update(no_key=True)
        .filter(provider=provider, capture_id=capture_id)
        .order_by("pk")
    )


def _hold(dispute: Dispute, account: Account, wanted: Decimal) -> None:
    if dispute.hold_id is not None:
        held = Hold.objects.filter(pk=dispute.hold_id, state=Hold.State.OPEN).first()
        if held is not None and held.amount.amount == wanted:
            return
        services.void_hold(hold_id=dispute.hold_id)
        dispute.hold_id = None
    if wanted > 0:
        dispute.holds_made += 1
        dispute.hold_id = hold_what_is_there(
            account=account,
            amount=Money(wanted, account.currency),
            key=f"dispute:{dispute.provider}:{dispute.external_id}:{dispute.holds_made}",
            ttl=HOLD_FOR,
        )
    dispute.save(update_fields=["hold", "holds_made"])


def hold_what_is_there(*, account: Account, amount: Money, key: str, ttl: timedelta) -> int | None:
    """A hold of the amount, or of as much as the wallet has; None when it has nothing."""
    here = wallet(account.code).available
    take = amount.amount if here is None else min(amount.amount, here)
    while take > 0:
        try:
            placed = services.create_hold(
                account=account, amount=Money(take, amount.currency), key=key, ttl=ttl, actor=ACTOR
            )
        except InsufficientFunds as shortage:  # somebody spent meanwhile; this figure is under the lock
            take = shortage.available
        else:
            return placed.hold_id
    return None


def gone_back(*, provider: str, capture_id: str) -> Decimal:
    """What of a capture went back to the payer, less what came back to us."""
    signed = Case(When(kind__in=_TAKEN, then=F("gross")), default=-F("gross"))
    rows = Settlement.objects.filter(
        provider=provider, parent_external_id=capture_id, kind__in=[*_TAKEN, *_CAME_BACK]
    )
    return rows.aggregate(total=Sum(signed, default=Decimal(0)))["total"]


def _moment(text: str) -> datetime:
    return datetime.fromisoformat(text).astimezone(UTC)
