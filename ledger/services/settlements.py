"""Booking money that moved outside."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal

from djmoney.money import Money

from ledger.services.calls import call


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
) -> SettledRefund:
    """Books money that a provider sent back, once per refund, or parks it until its capture is booked.

    `fee` is what the provider gave back of its own, in the currency of `amount`. What the wallet has not got
    any more becomes its owner's debt. Raises IdempotencyConflict for other figures under the same id, and
    BadPosting for a refund that exceeds what is left of the capture.
    """
    (row,) = call(
        "SELECT settlement_id, journal_id, replayed, parked FROM settle_refund(%s, %s, %s, %s, %s, %s, %s, %s)",
        [provider, external_id, capture_id, str(amount.currency), amount.amount, fee, actor, effective_at],
    )
    return SettledRefund(*row)
