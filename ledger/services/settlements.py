"""Booking money that moved outside."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from typing import Any

from djmoney.money import Money

from ledger.models import Account
from ledger.services.calls import as_jsonb, call
from ledger.services.journals import PostedJournal


@dataclass(frozen=True, slots=True)
class SettledRefund:
    """`parked`: its capture is not booked yet, and both ids are None until it is."""

    settlement_id: int | None
    journal_id: int | None
    replayed: bool
    parked: bool


def settle_refund(
    *,
    provider: str,
    external_id: str,
    capture_id: str,
    amount: Money,
    fee: Decimal,
    actor: str,
    effective_at: datetime | None = None,
    kind: str = "refund",
) -> SettledRefund:
    """Books money that went back, once per refund, or parks it until its capture is booked.

    `kind` is `refund` (we sent it) or `reversal` (the provider took it). `fee` is what the provider gave back
    of its own, in the currency of `amount`. What the wallet has not got any more becomes its owner's debt.
    Raises IdempotencyConflict for other figures under the same id, and BadPosting for one that exceeds what is
    left of the capture.
    """
    (row,) = call(
        "SELECT settlement_id, journal_id, replayed, parked FROM settle_refund(%s, %s, %s, %s, %s, %s, %s, %s, %s)",
        [
            provider,
            external_id,
            capture_id,
            str(amount.currency),
            amount.amount,
            fee,
            actor,
            effective_at,
            kind,
        ],
    )
    return SettledRefund(*row)


def settle_recovery(
    *,
    provider: str,
    kind: str,
    external_id: str,
    capture_id: str,
    amount: Money,
    fee: Decimal,
    actor: str,
    effective_at: datetime | None = None,
) -> SettledRefund:
    """Books money that came back to us after it was taken, once, or parks it until the taking is booked.

    `kind` is `reversal_cancelled` or `refund_failed`. Pays the wallet's debt first. Raises as `settle_refund`.
    """
    (row,) = call(
        "SELECT settlement_id, journal_id, replayed, parked FROM settle_recovery(%s, %s, %s, %s, %s, %s, %s, %s, %s)",
        [
            provider,
            kind,
            external_id,
            capture_id,
            str(amount.currency),
            amount.amount,
            fee,
            actor,
            effective_at,
        ],
    )
    return SettledRefund(*row)


def settle_transfer(
    *,
    provider: str,
    kind: str,
    external_id: str,
    credit: Account,
    debit: Account,
    amount: Money,
    actor: str,
    meta: dict[str, Any] | None = None,
    effective_at: datetime | None = None,
) -> PostedJournal:
    """Books money that somebody outside moved between two of the platform's own accounts, once.

    `kind` is `withdrawal`, `provider_fee`, `dispute_held`, `dispute_freed` or `payout`. Raises IdempotencyConflict and BadPosting.
    """
    (row,) = call(
        "SELECT journal_id, replayed FROM settle_transfer(%s, %s, %s, %s, %s, %s, %s, %s, %s, %s)",
        [provider, kind, external_id, credit.pk, debit.pk, str(amount.currency), amount.amount, actor,
         as_jsonb(meta or {}), effective_at],
    )  # fmt: skip
    return PostedJournal(*row)
