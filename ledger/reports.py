"""Reads over all of the books, for the back office."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date
from decimal import Decimal

from django.db import connection
from djmoney.money import Money

from ledger.models import Account, Entry
from ledger.selectors import POSTED, account_balance, entries_page


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


_NOW = f"SELECT a.id AS account_id, {POSTED}"
# Days of the past need the journals.
_THROUGH = """
SELECT e.account_id, sum(e.amount)
  FROM ledger_entries e JOIN ledger_journal j ON j.id = e.journal_id
 WHERE j.accounting_date <= %(through)s GROUP BY e.account_id
"""
_GROUPED = """
SELECT split_part(a.code, ':', 1), a.type, a.currency, count(*), sum(t.total)
  FROM ({totals}) t (account_id, total) JOIN ledger_account a ON a.id = t.account_id
 WHERE t.total <> 0
 GROUP BY 1, 2, 3
 ORDER BY a.currency, array_position(ARRAY['asset', 'liability', 'revenue', 'expense'], a.type::text), 1
"""


def trial_balance(*, through: date | None = None) -> list[TrialRow]:
    """Every account's balance at the end of that day, or now; debits equal credits in each currency."""
    totals = _NOW if through is None else _THROUGH
    with connection.cursor() as cursor:
        cursor.execute(_GROUPED.format(totals=totals), {"through": through})
        return [
            TrialRow(name, kind, currency, accounts, max(-total, Decimal(0)), max(total, Decimal(0)))
            for name, kind, currency, accounts, total in cursor.fetchall()
        ]


def balance_after(entry: Entry) -> Money:
    """The account's balance right after that leg; > 0 a credit balance."""
    (row,) = entries_page(account_id=entry.account_id, before=entry.pk + 1, limit=1).entries
    return Money(row.balance, row.currency)


def debt_of(wallet: Account) -> Decimal:
    """What the wallet's owner owes, in its currency: 0 for most."""
    receivable = Account.objects.filter(code=f"customer_receivable:{wallet.pk}").first()
    return -account_balance(receivable) if receivable else Decimal(0)
