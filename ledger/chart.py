"""The chart of accounts: every account of the platform, per currency."""

from __future__ import annotations

from ledger.models import Account

_ASSET, _LIABILITY = Account.Type.ASSET, Account.Type.LIABILITY
_REVENUE, _EXPENSE = Account.Type.REVENUE, Account.Type.EXPENSE

# name -> (number in the chart, type). All are hot: appended to, never locked.
# Wallets (2100 customer_credit:...) and their debts (1300 customer_receivable:...) are one per customer.
PLATFORM: dict[str, tuple[int, Account.Type]] = {
    "paypal_clearing": (1100, _ASSET),
    "paypal_dispute_held": (1120, _ASSET),
    "bank": (1200, _ASSET),
    "promo_deferred": (1500, _ASSET),
    "fx_brokerage": (1900, _ASSET),
    "provider_payable": (2200, _LIABILITY),
    "refunds_payable": (2300, _LIABILITY),
    "tax": (2400, _LIABILITY),
    "usage_revenue": (4100, _REVENUE),
    "breakage": (4200, _REVENUE),
    "provider_cost": (5100, _EXPENSE),
    "processor_fees": (5200, _EXPENSE),
    "promo_expense": (5300, _EXPENSE),
    "sla_credits": (5310, _EXPENSE),
    "chargeback_loss": (5400, _EXPENSE),
    "dispute_fees": (5410, _EXPENSE),
    "bad_debt": (5420, _EXPENSE),
    "rounding": (5500, _EXPENSE),
    "fx_gain_loss": (5700, _EXPENSE),
}
