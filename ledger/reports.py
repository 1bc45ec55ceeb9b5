"""Reads over all of the books, for the back office."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date
from decimal import Decimal

from django.db import connection
from django.db.models import Sum
from djmoney.money import Money

from ledger.models import Account, Entry


@dataclass(frozen=True, slots=True)
class TrialRow:
    """One line of the trial balance: an account of the platform, or all accounts of a kind that customers have.

    One of `debit` and `credit` is zero. Both are in `currency`.
    """

    name: str
    type: str
    currency: str
    accounts: int
    debit: Decimal
    credit: Decimal


# By account first: that is an index-only scan of the entries. Days of the past need the journals.
_ALL = "SELECT account_id, sum(amount) AS total FROM ledger_entries GROUP BY account_id"
_THROUGH = """
SELECT e.account_id, sum(e.amount) AS total
  FROM ledger_entries e JOIN ledger_journal j ON j.id = e.journal_id
 WHERE j.accounting_date <= %(through)s GROUP BY e.account_id
"""
_TRIAL_BALANCE = """
SELECT split_part(a.code, ':', 1), a.type, a.currency, count(*), sum(t.total)
  FROM ({totals}) t JOIN ledger_account a ON a.id = t.account_id
 GROUP BY 1, 2, 3
 ORDER BY a.currency, array_position(ARRAY['asset', 'liability', 'revenue', 'expense'], a.type::text), 1
"""


def trial_balance(*, through: date | None = None) -> list[TrialRow]:
    """Every account's balance at the end of that day, or now; debits equal credits in each currency."""
    totals = _ALL if through is None else _THROUGH
    with connection.cursor() as cursor:
        cursor.execute(_TRIAL_BALANCE.format(totals=totals), {"through": through})
        return [
            TrialRow(name, kind, currency, accounts, max(-total, Decimal(0)), max(total, Decimal(0)))
            for name, kind, currency, accounts, total in cursor.fetchall()
        ]


def balance_after(entry: Entry) -> Money:
    """The account's balance right after that leg; > 0 a credit balance."""
    older = Entry.objects.filter(account_id=entry.account_id, pk__lte=entry.pk)
    return Money(older.aggregate(total=Sum("amount"))["total"], entry.amount.currency)


def debt_of(wallet: Account) -> Decimal:
    """What the wallet's owner owes, in its currency: 0 for most."""
    owed = Entry.objects.filter(account__code=f"customer_receivable:{wallet.pk}")
    return -owed.aggregate(total=Sum("amount", default=Decimal(0)))["total"]
