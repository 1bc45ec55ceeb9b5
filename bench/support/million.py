"""What reading costs in books of a million entries, beside books of ten thousand."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import psycopg
from django.db import connections
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from apex.local.postgres import OWNER_ROLE
from ledger.bench import throw_away_database

_WALLETS, _READS = 1000, 30
# Journals of two legs from the wallets to one account, by COPY as fast as the guards let it; each wallet's
# entries carry its running balance.
_JOURNALS = """
COPY ledger_journal (id, public_id, kind, currency, idem_scope, idem_key, request_hash, effective_at, actor, meta)
FROM STDIN
"""
_ENTRIES = "COPY ledger_entries (journal_id, account_id, amount, amount_currency, balance) FROM STDIN"
_BALANCES = """
UPDATE ledger_balance b SET posted = e.total
  FROM (SELECT account_id, sum(amount) AS total FROM ledger_entries GROUP BY account_id) e
 WHERE e.account_id = b.account_id
"""


def read_a_million() -> dict[str, object]:
    """Milliseconds, medians, of a balance, a wallet's first page, its page in the middle, and the trial balance."""
    with throw_away_database() as url:
        owner = make_conninfo(url, user=OWNER_ROLE)
        wallets, revenue = _open(owner)
        _fill(owner, wallets, revenue, 0, 5_000)
        answer: dict[str, object] = {"at_10_000": _measure(url, wallets[0], revenue)}
        began = time.monotonic()
        _fill(owner, wallets, revenue, 5_000, 500_000)
        answer["loaded_in_s"] = round(time.monotonic() - began, 1)
        answer["at_1_000_000"] = _measure(url, wallets[0], revenue)
        return answer


def _open(owner: str) -> tuple[list[int], int]:
    with psycopg.connect(owner) as connection:
        rows = connection.execute(
            "SELECT account_open('customer_credit:' || n, 'bench', 'USD', 'liability', false, NULL)"
            " FROM generate_series(1, %s) n",
            [_WALLETS],
        ).fetchall()
        revenue = connection.execute(
            "SELECT account_open('usage_revenue:USD', 'platform', 'USD', 'revenue', true)"
        ).fetchone()
    assert revenue is not None
    return [row[0] for row in rows], revenue[0]


def _fill(owner: str, wallets: list[int], revenue: int, first: int, last: int) -> None:
    with psycopg.connect(owner) as connection, connection.cursor() as cursor:
        with cursor.copy(_JOURNALS) as copy:
            for number in range(first, last):
                copy.write_row(
                    (
                        number + 1, f"00000000-0000-7000-8000-{number:012}", "usage", "USD", "million", str(number),
                        b"", "2026-01-01T00:00:00Z", "bench", "{}",
                    )
                )  # fmt: skip
        with cursor.copy(_ENTRIES) as copy:
            for number in range(first, last):
                round_of = number // _WALLETS + 1  # every wallet has paid 1 that often
                copy.write_row((number + 1, wallets[number % _WALLETS], -1, "USD", -round_of))
                copy.write_row((number + 1, revenue, 1, "USD", None))
        cursor.execute(_BALANCES)
        connection.commit()
        connection.autocommit = True
        connection.execute("VACUUM ANALYZE")


def _measure(url: str, wallet_id: int, revenue: int) -> dict[str, float]:
    from ledger.models import Account
    from ledger.selectors import account_balance, entries_page, trial_balance, wallet
    from ledger.services import advance_totals

    before = dict(connections["default"].settings_dict)
    connections["default"].close()
    connections["default"].settings_dict.update(NAME=conninfo_to_dict(url)["dbname"])
    try:
        account = Account.objects.get(pk=wallet_id)
        entries = entries_page(account_id=wallet_id, limit=500).entries
        middle = entries[len(entries) // 2].id
        without = _median(trial_balance)
        advance_totals()
        return {
            "balance_ms": _median(lambda: wallet(account.code)),
            "first_page_ms": _median(lambda: entries_page(account_id=wallet_id)),
            "middle_page_ms": _median(lambda: entries_page(account_id=wallet_id, before=middle)),
            "platform_balance_ms": _median(lambda: account_balance(Account.objects.get(pk=revenue))),
            "trial_balance_without_totals_ms": without,
            "trial_balance_ms": _median(trial_balance),
        }
    finally:
        connections["default"].close()
        connections["default"].settings_dict.update(before)


def _median(read: Callable[[], object]) -> float:
    took = []
    for _ in range(_READS):
        began = time.perf_counter()
        read()
        took.append(time.perf_counter() - began)
    return round(statistics.median(took) * 1000, 2)
