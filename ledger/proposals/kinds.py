"""What an approved proposal does, kind by kind. Each is done under the proposal's own key: once."""

from __future__ import annotations

from collections.abc import Callable
from datetime import date, datetime

from django.db import transaction

from ledger.models import CreditGrant, Journal, Proposal
from ledger.payouts import book_bill, start_payout
from ledger.paypal.refunds import intend_refund
from ledger.services import adjust, close_period, grant_credit, reopen_period, reverse, write_off
from ledger.tasks import drive_refund

Kind = Proposal.Kind
# Where the other leg of an adjustment may go: what staff give away, lose, or find.
COUNTER_ACCOUNTS = {
    "promo_expense": "goodwill (promotional expense)",
    "usage_revenue": "usage revenue (a wrong charge)",
    "bank": "bank (paid or returned by transfer)",
    "rounding": "rounding",
}
GRANT_KINDS = {
    CreditGrant.Kind.PROMOTIONAL.value: "promotional: an expense when it is used",
    CreditGrant.Kind.SLA.value: "amends for a broken promise",
}


def carry_out(proposal: Proposal) -> int | None:
    """Does it, in the caller's transaction; the id of its journal where there is one at once.

    Raises LedgerError and ValueError, with words for people.
    """
    return _DEEDS[Kind(proposal.kind)](proposal)


def _key(proposal: Proposal) -> str:
    return f"proposal:{proposal.public_id}"


def _adjust(proposal: Proposal) -> int:
    assert proposal.account is not None
    assert proposal.amount is not None
    return adjust(
        account=proposal.account,
        amount=proposal.amount,
        against=proposal.payload["counter"],
        key=_key(proposal),
        reason=proposal.reason,
        actor=_key(proposal),
    ).journal_id


def _grant(proposal: Proposal) -> int:
    assert proposal.account is not None
    assert proposal.amount is not None
    expires_at = proposal.payload["expires_at"]
    return grant_credit(
        account=proposal.account,
        kind=CreditGrant.Kind(proposal.payload["grant"]),
        amount=proposal.amount,
        key=_key(proposal),
        actor=_key(proposal),
        expires_at=datetime.fromisoformat(expires_at) if expires_at else None,
        note=proposal.reason[:200],
    ).journal_id


def _write_off(proposal: Proposal) -> int:
    assert proposal.account is not None
    assert proposal.amount is not None
    return write_off(
        account=proposal.account,
        amount=proposal.amount,
        key=_key(proposal),
        reason=proposal.reason,
        actor=_key(proposal),
    ).journal_id


def _reverse(proposal: Proposal) -> int:
    journal = Journal.objects.get(pk=proposal.payload["journal"])
    return reverse(journal=journal, reason=proposal.reason, actor=_key(proposal)).journal_id


def _refund(proposal: Proposal) -> None:
    """Writes the refund down; the money goes after the commit. It is booked on PayPal's proof, not here."""
    assert proposal.amount is not None
    refund = intend_refund(
        capture_id=proposal.payload["capture"],
        amount=proposal.amount,
        reason=proposal.reason,
        actor=_key(proposal),
        idempotency_key=_key(proposal),
        allow_debt=proposal.payload["allow_debt"],
    )
    # A lost hint is made good by the sweep of unfinished refunds.
    transaction.on_commit(lambda: drive_refund.delay(refund.pk), robust=True)


def _bill(proposal: Proposal) -> int:
    assert proposal.amount is not None
    return book_bill(
        payee=proposal.payload["payee"],
        number=proposal.payload["number"],
        amount=proposal.amount,
        reason=proposal.reason,
        actor=_key(proposal),
    ).journal_id


def _payout(proposal: Proposal) -> None:
    """Writes the payout down. It is booked on the bank's proof, not here."""
    assert proposal.amount is not None
    start_payout(
        payee=proposal.payload["payee"],
        amount=proposal.amount,
        actor=_key(proposal),
        idempotency_key=_key(proposal),
        note=proposal.reason,
    )


def _close(proposal: Proposal) -> None:
    day = date.fromisoformat(proposal.payload["through"])
    close_period(through=day, actor=_key(proposal), note=proposal.reason)


def _reopen(proposal: Proposal) -> None:
    day = date.fromisoformat(proposal.payload["through"])
    reopen_period(through=day, actor=_key(proposal), reason=proposal.reason)


_DEEDS: dict[Kind, Callable[[Proposal], int | None]] = {
    Kind.ADJUSTMENT: _adjust,
    Kind.GRANT: _grant,
    Kind.WRITE_OFF: _write_off,
    Kind.REVERSAL: _reverse,
    Kind.REFUND: _refund,
    Kind.BILL: _bill,
    Kind.PAYOUT: _payout,
    Kind.CLOSE_PERIOD: _close,
    Kind.REOPEN_PERIOD: _reopen,
}
