"""Posting journals, and taking them back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from decimal import Decimal
from typing import Any
from uuid import UUID

from djmoney.money import Money
from psycopg.types.json import Jsonb

from ledger.models import Account
from ledger.services.calls import as_jsonb, call


@dataclass(frozen=True, slots=True)
class Line:
    """One leg to be: > 0 credits the account, < 0 debits it. At most 9 decimals."""

    account_id: int
    amount: Decimal


@dataclass(frozen=True, slots=True)
class JournalRequest:
    """A journal to be. `capture_hold` is the hold that was taken for this delivery."""

    scope: str
    key: str
    kind: str
    currency: str
    lines: Sequence[Line]
    actor: str
    meta: dict[str, Any] = field(default_factory=dict)
    effective_at: datetime | None = None
    capture_hold: int | None = None


@dataclass(frozen=True, slots=True)
class PostedJournal:
    """`replayed`: the key had been used for the same request, and this is the first result."""

    journal_id: int
    replayed: bool
    public_id: UUID | None = None  # a batch does not tell it


@dataclass(frozen=True, slots=True)
class Exchange:
    """Two journals of one group: out of the one currency, into the other."""

    group_id: UUID
    from_journal_id: int
    to_journal_id: int
    replayed: bool


def post_journal(
    *,
    scope: str,
    key: str,
    kind: str,
    currency: str,
    lines: Sequence[Line],
    actor: str,
    meta: dict[str, Any] | None = None,
    effective_at: datetime | None = None,
) -> PostedJournal:
    """Books one journal, once per (scope, key).

    Raises InsufficientFunds, IdempotencyConflict, PeriodClosed, BadPosting.
    """
    (row,) = call(
        "SELECT journal_id, replayed, public_id FROM ledger_post(%s, %s, %s, %s, %s, %s, %s, %s)",
        [scope, key, kind, currency, Jsonb(as_lines(lines)), actor, as_jsonb(meta or {}), effective_at],
    )
    return PostedJournal(*row)


def post_journals(journals: Sequence[JournalRequest]) -> list[PostedJournal]:
    """Books all or none, in one round trip; results in the order of `journals`.

    A journal with `capture_hold` closes that hold and is always booked, if need be as the customer's
    debt. The others raise as `post_journal` does; the message names scope and key.
    """
    if not journals:
        return []
    rows = call(
        "SELECT journal_id, replayed FROM ledger_post_batch(%s) ORDER BY ordinal",
        [as_jsonb([_as_item(journal) for journal in journals])],
    )
    return [PostedJournal(*row) for row in rows]


def reverse_journal(*, journal_id: int, reason: str, actor: str) -> PostedJournal:
    """Takes a journal back by one with the opposite legs, dated now. Once per journal."""
    (row,) = call(
        "SELECT journal_id, replayed, public_id FROM reverse_journal(%s, %s, %s)", [journal_id, reason, actor]
    )
    return PostedJournal(*row)


def exchange(
    *,
    key: str,
    source: Account,
    sold: Money,
    target: Account,
    bought: Money,
    actor: str,
    meta: dict[str, Any] | None = None,
    effective_at: datetime | None = None,
) -> Exchange:
    """Money from one currency into another over the fx_brokerage accounts, once per key: both journals or none.

    The rate is what the two amounts say. Raises InsufficientFunds, IdempotencyConflict, BadPosting.
    """
    for account, amount in ((source, sold), (target, bought)):
        if account.currency != str(amount.currency):
            raise ValueError(f"{account} is in {account.currency}, the amount in {amount.currency}")
    (row,) = call(
        "SELECT group_id, from_journal_id, to_journal_id, replayed FROM exchange_post(%s, %s, %s, %s, %s, %s, %s, %s)",
        [key, source.pk, sold.amount, target.pk, bought.amount, actor, as_jsonb(meta or {}), effective_at],
    )
    return Exchange(*row)


def as_lines(lines: Sequence[Line]) -> list[dict[str, Any]]:
    return [{"account": line.account_id, "amount": f"{line.amount:f}"} for line in lines]


def _as_item(journal: JournalRequest) -> dict[str, Any]:
    return {
        "scope": journal.scope,
        "key": journal.key,
        "kind": journal.kind,
        "currency": journal.currency,
        "lines": as_lines(journal.lines),
        "actor": journal.actor,
        "meta": journal.meta,
        "effective_at": journal.effective_at,
        "capture_hold": journal.capture_hold,
    }
