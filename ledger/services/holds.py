"""Setting credit aside, and what becomes of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any

from djmoney.money import Money
from psycopg.types.json import Jsonb

from ledger.models import Account
from ledger.services.calls import as_jsonb, call
from ledger.services.journals import Line, PostedJournal, as_lines


@dataclass(frozen=True, slots=True)
class PlacedHold:
    """`available` is what the wallet has left, None when it has no limit."""

    hold_id: int
    replayed: bool
    available: Decimal | None


def create_hold(*, account: Account, amount: Money, key: str, ttl: timedelta, actor: str) -> PlacedHold:
    """Sets credit aside, once per key. Raises InsufficientFunds, IdempotencyConflict, BadPosting."""
    (row,) = call(
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
    (row,) = call(
        "SELECT journal_id, replayed, public_id FROM hold_capture(%s, %s, %s, %s, %s, %s, %s, %s, %s)",
        [
            hold_id,
            scope,
            key,
            kind,
            currency,
            Jsonb(as_lines(lines)),
            actor,
            as_jsonb(meta or {}),
            effective_at,
        ],
    )
    return PostedJournal(*row)


def void_hold(*, hold_id: int) -> bool:
    """Releases a hold. True when this call did it."""
    ((released,),) = call("SELECT hold_void(%s)", [hold_id])
    return bool(released)


def expire_due_holds(*, limit: int) -> int:
    """Releases holds whose time is over, the oldest first; returns how many, at most `limit`."""
    ((released,),) = call("SELECT hold_expire_due(%s)", [limit])
    return int(released)
