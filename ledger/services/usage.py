"""Metered usage: lines in by COPY, out as journals that are netted per wallet.

Two ways: `charge_lines` for what was delivered under holds and is paid at once, `load_usage` and `post_usage` for
late and corrected lines, which wait for the next tick.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal

from django.db import connection, transaction

from ledger.errors import translated
from ledger.services.calls import call

_COPY = (
    "COPY pg_temp.usage_line_staging"
    " (event_id, account_id, sku, quantity, rate, amount, currency, corrects, occurred_at, hold_id) FROM STDIN"
)


@dataclass(frozen=True, slots=True)
class MeteredLine:
    """Something delivered. Its amount is quantity times rate, half-even at 9 places, unless it was rated elsewhere.

    `corrects` is the event id of a line that this one replaces, of the same wallet; each is replaced once.
    """

    event_id: str
    account_id: int
    sku: str
    quantity: Decimal
    currency: str
    occurred_at: datetime
    rate: Decimal | None = None
    amount: Decimal | None = None
    corrects: str | None = None


@dataclass(frozen=True, slots=True)
class DeliveredLine:
    """Something delivered, rated already: `amount` is above zero, with at most 9 decimals.

    `hold_id` is the hold that was taken for it; it may have expired.
    """

    event_id: str
    account_id: int
    sku: str
    quantity: Decimal
    amount: Decimal
    currency: str
    occurred_at: datetime
    hold_id: int | None = None


@dataclass(frozen=True, slots=True)
class LoadedUsage:
    """`known` lines were loaded before. `conflicting` and `orphans` name the events that were left out: loaded
    before with other content, and corrections of what is not there."""

    loaded: int
    known: int
    conflicting: Sequence[str]
    orphans: Sequence[str]


def load_usage(lines: Iterable[MeteredLine]) -> LoadedUsage:
    """Loads each event once, however often it is told. Raises BadPosting when a line is malformed: then none is."""
    with translated(), transaction.atomic():
        _stage(
            (
                line.event_id, line.account_id, line.sku, line.quantity, line.rate, line.amount, line.currency,
                line.corrects, line.occurred_at, None,
            )
            for line in lines
        )  # fmt: skip
        (row,) = call("SELECT loaded, known, conflicting, orphans FROM usage_load()", [])
        return LoadedUsage(*row)


def post_usage(*, limit: int, actor: str = "system:usage") -> int:
    """Books at most `limit` lines that are due, one journal per currency; returns how many. Any number may run at
    once. What a wallet cannot pay becomes its owner's debt: it was delivered."""
    ((posted,),) = call("SELECT usage_post(%s, %s)", [limit, actor])
    return int(posted)


def charge_lines(lines: Iterable[DeliveredLine], *, actor: str) -> dict[str, int]:
    """Charges each event once, all or none: one journal per wallet, and the holds captured with it.

    Gives the journal of each event. What was held for is charged even when the wallet cannot pay: its owner's debt.
    Raises InsufficientFunds for lines without a hold, BadPosting, HoldNotOpen for a hold that the wallet never had,
    IdempotencyConflict for an event that is known otherwise.
    """
    with translated(), transaction.atomic():
        _stage(
            (
                line.event_id, line.account_id, line.sku, line.quantity, None, line.amount, line.currency,
                None, line.occurred_at, line.hold_id,
            )
            for line in lines
        )  # fmt: skip
        return dict(call("SELECT event_id, journal_id FROM usage_charge(%s)", [actor]))


def _stage(rows: Iterable[tuple[object, ...]]) -> None:
    call("SELECT usage_stage()", [])
    with connection.cursor() as cursor, cursor.copy(_COPY) as copy:
        for row in rows:
            copy.write_row(row)
