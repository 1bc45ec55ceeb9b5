"""Every write to the books. Thin: the work is done by the SQL functions, in one round trip each.

Inside a transaction each call is a savepoint, so a refusal (ledger.errors) leaves it usable.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

from django.core.serializers.json import DjangoJSONEncoder
from django.db import connection, transaction
from djmoney.money import Money
from psycopg.types.json import Jsonb

from ledger.chart import PLATFORM
from ledger.errors import translated
from ledger.models import Account, AuditEvent


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
class PlacedHold:
    """`available` is what the wallet has left, None when it has no limit."""

    hold_id: int
    replayed: bool
    available: Decimal | None


@dataclass(frozen=True, slots=True)
class SettledRefund:
    """`parked`: its capture is not booked yet, and both ids are None until it is."""

    settlement_id: int | None
    journal_id: int | None
    replayed: bool
    parked: bool


def open_wallet(*, code: str, owner: str, currency: str) -> Account:
    """The customer's account of that code, opened when new. Raises IdempotencyConflict, BadPosting."""
    return _open_account(code, owner, currency, Account.Type.LIABILITY, hot=False)


def platform_account(*, code: str, currency: str) -> Account:
    """The platform's account of that name in the chart (ledger/chart.py), opened when new."""
    if code not in PLATFORM:
        raise ValueError(f"{code!r} is not in the chart of accounts; it has {', '.join(sorted(PLATFORM))}")
    _, kind = PLATFORM[code]
    return _open_account(f"{code}:{currency}", "platform", currency, kind, hot=True)


def _open_account(code: str, owner: str, currency: str, kind: Account.Type, *, hot: bool) -> Account:
    (row,) = _call("SELECT account_open(%s, %s, %s, %s, %s)", [code, owner, currency, kind.value, hot])
    return Account.objects.get(pk=row[0])


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
    (row,) = _call(
        "SELECT journal_id, replayed, public_id FROM ledger_post(%s, %s, %s, %s, %s, %s, %s, %s)",
        [scope, key, kind, currency, Jsonb(_lines(lines)), actor, _jsonb(meta or {}), effective_at],
    )
    return PostedJournal(*row)


def post_journals(journals: Sequence[JournalRequest]) -> list[PostedJournal]:
    """Books all or none, in one round trip; results in the order of `journals`.

    A journal with `capture_hold` closes that hold and is always booked, if need be as the customer's
    debt. The others raise as `post_journal` does; the message names scope and key.
    """
    if not journals:
        return []
    rows = _call(
        "SELECT journal_id, replayed FROM ledger_post_batch(%s) ORDER BY ordinal",
        [_jsonb([_as_item(journal) for journal in journals])],
    )
    return [PostedJournal(*row) for row in rows]


def reverse_journal(*, journal_id: int, reason: str, actor: str) -> PostedJournal:
    """Takes a journal back by one with the opposite legs, dated now. Once per journal."""
    (row,) = _call(
        "SELECT journal_id, replayed, public_id FROM reverse_journal(%s, %s, %s)", [journal_id, reason, actor]
    )
    return PostedJournal(*row)


def create_hold(*, account: Account, amount: Money, key: str, ttl: timedelta, actor: str) -> PlacedHold:
    """Sets credit aside, once per key. Raises InsufficientFunds, IdempotencyConflict, BadPosting."""
    (row,) = _call(
        "SELECT hold_id, replayed, available FROM hold_create(%s, %s, %s, %s, %s, %s)",
        [account.pk, amount.amount, str(amount.currency), key, ttl, actor],
    )
    return PlacedHold(*row)


def capture_hold(
    *,
    hold_id: int,
    scope: str,
    key: str,
    kind: str,
    currency: str,
    lines: Sequence[Line],
    actor: str,
    meta: dict[str, Any] | None = None,
    effective_at: datetime | None = None,
) -> PostedJournal:
    """Books a journal out of a hold and releases the rest of it.

    Raises HoldNotOpen, OverCapture, and what `post_journal` raises.
    """
    (row,) = _call(
        "SELECT journal_id, replayed, public_id FROM hold_capture(%s, %s, %s, %s, %s, %s, %s, %s, %s)",
        [hold_id, scope, key, kind, currency, Jsonb(_lines(lines)), actor, _jsonb(meta or {}), effective_at],
    )
    return PostedJournal(*row)


def void_hold(*, hold_id: int) -> bool:
    """Releases a hold. True when this call did it."""
    ((released,),) = _call("SELECT hold_void(%s)", [hold_id])
    return bool(released)


def expire_due_holds(*, limit: int) -> int:
    """Releases holds whose time is over, the oldest first; returns how many, at most `limit`."""
    ((released,),) = _call("SELECT hold_expire_due(%s)", [limit])
    return int(released)


def settle_refund(
    *,
    provider: str,
    external_id: str,
    capture_id: str,
    amount: Money,
    fee: Decimal,
    actor: str,
    effective_at: datetime | None = None,
) -> SettledRefund:
    """Books money that a provider sent back, once per refund, or parks it until its capture is booked.

    `fee` is what the provider gave back of its own, in the currency of `amount`. What the wallet has not got
    any more becomes its owner's debt. Raises IdempotencyConflict for other figures under the same id, and
    BadPosting for a refund that exceeds what is left of the capture.
    """
    (row,) = _call(
        "SELECT settlement_id, journal_id, replayed, parked FROM settle_refund(%s, %s, %s, %s, %s, %s, %s, %s)",
        [provider, external_id, capture_id, str(amount.currency), amount.amount, fee, actor, effective_at],
    )
    return SettledRefund(*row)


def record_audit_event(
    *,
    actor: str,
    action: str,
    object_type: str,
    object_id: str,
    before: dict[str, Any] | None = None,
    after: dict[str, Any] | None = None,
    request_id: str = "",
) -> None:
    """Appends to the audit trail, in the caller's transaction. No secrets in `before` and `after`."""
    AuditEvent.objects.bulk_create(
        [
            AuditEvent(
                actor=actor,
                action=action,
                object_type=object_type,
                object_id=object_id,
                before=_plain(before),
                after=_plain(after),
                request_id=request_id,
            )
        ]
    )


def _call(query: str, params: Sequence[Any]) -> list[tuple[Any, ...]]:
    with translated(), connection.cursor() as cursor:
        if not connection.in_atomic_block:
            cursor.execute(query, params)
            return cursor.fetchall()
        with transaction.atomic():
            cursor.execute(query, params)
            return cursor.fetchall()


def _lines(lines: Sequence[Line]) -> list[dict[str, Any]]:
    return [{"account": line.account_id, "amount": f"{line.amount:f}"} for line in lines]


def _as_item(journal: JournalRequest) -> dict[str, Any]:
    return {
        "scope": journal.scope,
        "key": journal.key,
        "kind": journal.kind,
        "currency": journal.currency,
        "lines": _lines(journal.lines),
        "actor": journal.actor,
        "meta": journal.meta,
        "effective_at": journal.effective_at,
        "capture_hold": journal.capture_hold,
    }


def _jsonb(value: Any) -> Jsonb:
    return Jsonb(_plain(value))


def _plain(value: Any) -> Any:
    """With times, decimals and UUIDs as text."""
    return json.loads(json.dumps(value, cls=DjangoJSONEncoder))
