"""Payments in a currency that PayPal changes on the way: what is at PayPal is of the other currency.

The books follow with an exchange between the two clearing accounts over fx_brokerage, in the transaction of
the settlement. The rate is what PayPal's two amounts say.
"""

from __future__ import annotations

from datetime import datetime

from djmoney.money import Money

from ledger.services import exchange, platform_account


def book_conversion(*, key: str, left: Money, came: Money, at: datetime, actor: str) -> None:
    """PayPal took `left` out of its balance of ours in one currency and put `came` into another. Once per key."""
    if came.amount <= 0 or left.amount <= 0:
        return
    # Clearing is an asset: what comes in is a debit, which is what the source of an exchange is charged.
    exchange(
        key=key,
        source=platform_account(code="paypal_clearing", currency=str(came.currency)),
        sold=came,
        target=platform_account(code="paypal_clearing", currency=str(left.currency)),
        bought=left,
        actor=actor,
        effective_at=at,
    )
