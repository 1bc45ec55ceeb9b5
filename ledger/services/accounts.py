"""Opening accounts."""

from __future__ import annotations

from ledger.chart import PLATFORM
from ledger.models import Account
from ledger.services.calls import call


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
    (row,) = call("SELECT account_open(%s, %s, %s, %s, %s)", [code, owner, currency, kind.value, hot])
    return Account.objects.get(pk=row[0])
