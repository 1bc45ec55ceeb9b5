"""What the back office does to the books: each with a reason, in the audit trail, and as new journals only.

Who may do it, up to what amount and with whose approval is for the caller to ask.
"""

from __future__ import annotations

from datetime import date
from typing import Any

from django.db import transaction
from djmoney.money import Money

from ledger.models import Account, Journal
from ledger.services.accounts import platform_account
from ledger.services.calls import call
from ledger.services.journals import Line, PostedJournal, post_journal, reverse_journal
from ledger.services.trail import record_audit_event


@transaction.atomic
def adjust(
    *,
    account: Account,
    amount: Money,
    against: str,
    key: str,
    reason: str,
    actor: str,
    request_id: str = "",
) -> PostedJournal:
    """Credits a wallet (amount > 0) or debits it (< 0) against an account of the chart, once per key.

    A wallet is not taken below its floor. Raises InsufficientFunds, IdempotencyConflict, BadPosting, and
    ValueError without a reason.
    """
    _need_reason(reason)
    currency = str(amount.currency)
    other = platform_account(code=against, currency=currency)
    posted = post_journal(
        scope="adjustment",
        key=key,
        kind="adjustment",
        currency=currency,
        lines=[Line(account.pk, amount.amount), Line(other.pk, -amount.amount)],
        actor=actor,
        meta={"reason": reason},
    )
    _record("books.adjusted", posted, actor, request_id, account=account.code, against=against,
            amount=str(amount.amount), currency=currency, reason=reason)  # fmt: skip
    return posted


@transaction.atomic
def write_off(
    *,
    account: Account,
    amount: Money,
    key: str,
    reason: str,
    actor: str,
    expense: str = "bad_debt",
    request_id: str = "",
) -> PostedJournal:
    """Gives up a debt of the wallet's owner, or a part of it, once per key. Never more than is owed: BadPosting."""
    currency = str(amount.currency)
    paid_by = platform_account(code=expense, currency=currency)
    (row,) = call(
        "SELECT journal_id, replayed, public_id FROM debt_write_off(%s, %s, %s, %s, %s, %s)",
        [account.pk, paid_by.pk, amount.amount, key, reason, actor],
    )
    posted = PostedJournal(*row)
    _record("debt.written_off", posted, actor, request_id, account=account.code, expense=expense,
            amount=str(amount.amount), currency=currency, reason=reason)  # fmt: skip
    return posted


@transaction.atomic
def reverse(*, journal: Journal, reason: str, actor: str, request_id: str = "") -> PostedJournal:
    """`reverse_journal` with its line in the audit trail."""
    posted = reverse_journal(journal_id=journal.pk, reason=reason, actor=actor)
    _record("journal.reversed", posted, actor, request_id, reverses=str(journal.public_id), reason=reason)
    return posted


@transaction.atomic
def close_period(*, through: date, actor: str, note: str = "", request_id: str = "") -> int:
    """No journal is dated on or before `through` from now on. Waits for those under way; BadPosting when the
    day is not over, or closed already. Returns the id of the row."""
    return _move_close("period_close", "period.closed", through, actor, note, request_id)


@transaction.atomic
def reopen_period(*, through: date, actor: str, reason: str, request_id: str = "") -> int:
    """Opens every day after `through` again. Raises BadPosting without a reason, or when those days are open."""
    return _move_close("period_reopen", "period.reopened", through, actor, reason, request_id)


def _move_close(function: str, action: str, through: date, actor: str, note: str, request_id: str) -> int:
    ((before,),) = call(
        "SELECT max(closed_through) FROM ledger_period_close WHERE id = (SELECT max(id) FROM ledger_period_close)",
        [],
    )
    ((period_id,),) = call(f"SELECT {function}(%s, %s, %s)", [through, note, actor])
    record_audit_event(
        actor=actor,
        action=action,
        object_type="period_close",
        object_id=str(period_id),
        before={"closed_through": before},
        after={"closed_through": through, "note": note},
        request_id=request_id,
    )
    return int(period_id)


def _record(action: str, posted: PostedJournal, actor: str, request_id: str, **facts: Any) -> None:
    if posted.replayed:
        return
    record_audit_event(
        actor=actor,
        action=action,
        object_type="journal",
        object_id=str(posted.public_id),
        after=facts,
        request_id=request_id,
    )


def _need_reason(reason: str) -> None:
    if not reason.strip():
        raise ValueError("a reason is needed")
