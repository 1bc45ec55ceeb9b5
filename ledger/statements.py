"""What happened on a wallet in a month, from its opening to its closing balance."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Self

from django.db import connection

from ledger.models import Account

# Thousands of small charges a day are one line; everything else is told journal by journal.
_NETTED = ["usage"]


@dataclass(frozen=True, slots=True, order=True)
class Month:
    """A calendar month of the books, whose days are those of UTC."""

    year: int
    month: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """From `2026-11`. Raises ValueError for anything else, and for months that have not begun."""
        if len(text) != 7 or text[4] != "-" or not (text[:4] + text[5:]).isdecimal() or not text.isascii():
            raise ValueError(f"a month is written like 2026-11, not {text[:20]!r}")
        found = cls(int(text[:4]), int(text[5:]))
        if not 1 <= found.month <= 12 or found.year < 2000:
            raise ValueError(f"there is no month {text}")
        if found > cls.of(datetime.now(UTC).date()):
            raise ValueError(f"{text} has not begun")
        return found

    @classmethod
    def of(cls, day: date) -> Self:
        return cls(day.year, day.month)

    @property
    def first(self) -> date:
        return date(self.year, self.month, 1)

    @property
    def last(self) -> date:
        return self.following.first - timedelta(days=1)

    @property
    def following(self) -> Month:
        return Month(self.year + self.month // 12, self.month % 12 + 1)

    @property
    def is_over(self) -> bool:
        return datetime.now(UTC).date() > self.last

    def __str__(self) -> str:
        return f"{self.year}-{self.month:02d}"


@dataclass(frozen=True, slots=True)
class StatementLine:
    """One journal, or the charges of one day. `balance` is the wallet's after it; > 0 credits the wallet."""

    day: date
    kind: str
    reference: str  # the journal's public id; empty for a day's charges
    lines: int  # journals, or for charges the usage lines that they net
    amount: Decimal
    balance: Decimal


@dataclass(frozen=True, slots=True)
class Statement:
    """opening + the sum of the lines = closing, all in `currency`."""

    owner: str
    currency: str
    month: Month
    opening: Decimal
    lines: tuple[StatementLine, ...]
    made_at: datetime

    @property
    def closing(self) -> Decimal:
        return self.lines[-1].balance if self.lines else self.opening

    @property
    def credited(self) -> Decimal:
        return sum((line.amount for line in self.lines if line.amount > 0), Decimal(0))

    @property
    def debited(self) -> Decimal:
        return -sum((line.amount for line in self.lines if line.amount < 0), Decimal(0))


# One snapshot. The opening balance is counted back from what is posted now, so that a month of a busy
# wallet is read and not its whole life.
_MONTH = """
WITH moved AS MATERIALIZED (
    SELECT e.id, e.amount, j.kind, j.public_id, j.accounting_date AS day,
           coalesce((j.meta ->> 'lines')::int, 1) AS lines
      FROM ledger_entries e JOIN ledger_journal j ON j.id = e.journal_id
     WHERE e.account_id = %(account)s AND j.accounting_date >= %(first)s
)
SELECT NULL, NULL, '', 0, b.posted - (SELECT coalesce(sum(amount), 0) FROM moved), 0
  FROM ledger_balance b WHERE b.account_id = %(account)s
UNION ALL
(SELECT day, kind, CASE WHEN kind = ANY (%(netted)s) THEN '' ELSE min(public_id::text) END,
        sum(lines), sum(amount), min(id)
   FROM moved WHERE day <= %(last)s
  GROUP BY day, kind, CASE WHEN kind = ANY (%(netted)s) THEN 0 ELSE id END)
"""


def statement(*, account: Account, owner: str, month: Month) -> Statement:
    """The month on that wallet; `owner` is whom it is made out to. Raises ValueError for other accounts."""
    with connection.cursor() as cursor:
        cursor.execute(
            _MONTH, {"account": account.pk, "first": month.first, "last": month.last, "netted": _NETTED}
        )
        rows = cursor.fetchall()
        cursor.execute("SELECT clock_timestamp()")
        (made_at,) = cursor.fetchone()
    heads = [row for row in rows if row[0] is None]
    if not heads:
        raise ValueError(f"account {account} is no wallet and has no statements")
    opening = heads[0][4]
    moved = sorted((row for row in rows if row[0] is not None), key=lambda row: (row[0], row[5]))
    return Statement(owner, account.currency, month, opening, tuple(_with_balances(opening, moved)), made_at)


def _with_balances(opening: Decimal, rows: Iterable[tuple]) -> Iterable[StatementLine]:  # type: ignore[type-arg]
    balance = opening
    for day, kind, reference, lines, amount, _ in rows:
        balance += amount
        yield StatementLine(day, kind, reference, lines, amount, balance)


def months_of(account: Account) -> list[Month]:
    """From the month the account was opened in to the present one, newest first."""
    month, newest = Month.of(account.created_at.astimezone(UTC).date()), Month.of(datetime.now(UTC).date())
    months = []
    while month <= newest:
        months.append(month)
        month = month.following
    return months[::-1]
