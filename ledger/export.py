"""The books as an hledger journal, for a program that shares no line with ours to check.

hledger counts debits above zero: every sign is turned. The last posting of an account on a day asserts its
balance then, and a last transaction of zeros asserts the balances we keep, wallets from ledger_balance.
"""

from __future__ import annotations

from collections.abc import Iterator
from decimal import Decimal
from itertools import groupby
from typing import Any
from urllib.parse import quote

from django.db import connection, transaction

_PAGE = 5000
_TOP = {"asset": "assets", "liability": "liabilities", "revenue": "revenues", "expense": "expenses"}

_ACCOUNTS = """
SELECT a.type, a.code, a.currency,
       coalesce(b.posted, (SELECT sum(e.amount) FROM ledger_entries e WHERE e.account_id = a.id), 0)
  FROM ledger_account a LEFT JOIN ledger_balance b ON b.account_id = a.id ORDER BY a.type, a.code
"""
# `balance` is the account's after the leg, for the last leg of a day.
_LEGS = """
DECLARE ledger_export NO SCROLL CURSOR FOR
SELECT j.accounting_date, j.id, j.public_id, j.kind, a.type, a.code, e.amount, e.amount_currency,
       CASE WHEN lead(j.accounting_date) OVER history IS DISTINCT FROM j.accounting_date
            THEN sum(e.amount) OVER history END AS balance
  FROM ledger_entries e
  JOIN ledger_journal j ON j.id = e.journal_id
  JOIN ledger_account a ON a.id = e.account_id
WINDOW history AS (PARTITION BY e.account_id ORDER BY j.accounting_date, j.id, e.id)
 ORDER BY j.accounting_date, j.id, e.id
"""


def hledger_journal() -> Iterator[str]:
    """Lines of text, with their ends, from one snapshot. Memory does not grow with the number of entries."""
    with transaction.atomic(), connection.cursor() as cursor:
        if len(connection.savepoint_ids) == 0:
            cursor.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
        cursor.execute(_ACCOUNTS)
        accounts = cursor.fetchall()
        for currency in sorted({currency for _, _, currency, _ in accounts}):
            yield f"commodity 1000.000000000 {currency}\n"
        for kind, code, _, _ in accounts:
            yield f"account {hledger_account(kind, code)}\n"
        # The last day of the books; hledger takes a journal without entries as well.
        cursor.execute(
            "SELECT coalesce(max(accounting_date), (now() AT TIME ZONE 'UTC')::date) FROM ledger_journal"
        )
        (last_day,) = cursor.fetchone()
        cursor.execute(_LEGS)
        yield from _transactions(_fetch(cursor))
        if accounts:
            yield f"\n{last_day} closing balances\n"
        for kind, code, currency, balance in accounts:
            yield _posting(hledger_account(kind, code), Decimal(0), currency, balance)


def hledger_account(kind: str, code: str) -> str:
    """`liabilities:customer_credit:...`; what hledger would take for syntax is percent-encoded."""
    return f"{_TOP[kind]}:{quote(code, safe=':@')}"


def _fetch(cursor: Any) -> Iterator[tuple[Any, ...]]:
    while True:
        cursor.execute(f"FETCH {_PAGE} FROM ledger_export")
        rows = cursor.fetchall()
        yield from rows
        if len(rows) < _PAGE:
            cursor.execute("CLOSE ledger_export")
            return


def _transactions(legs: Iterator[tuple[Any, ...]]) -> Iterator[str]:
    for (day, journal_id, public_id, kind), rows in groupby(legs, key=lambda leg: leg[:4]):
        yield f"\n{day} ({public_id}) {quote(kind, safe=' ')}  ; journal {journal_id}\n"
        for *_, account_type, code, amount, currency, balance in rows:
            yield _posting(hledger_account(account_type, code), amount, currency, balance)


def _posting(account: str, amount: Decimal, currency: str, balance: Decimal | None) -> str:
    asserted = "" if balance is None else f" = {-balance:f} {currency}"
    return f"    {account}  {-amount:f} {currency}{asserted}\n"
