"""Proves the books: each check is one SQL that returns what is wrong, and nothing when all is well."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from django.db import connection, transaction

from ledger.history_checks import HISTORY_CHECKS

# As many rows of a failed check as are shown; one is enough to fail.
ROWS_SHOWN = 100

_CHECKS: dict[str, str] = {
    "currencies_sum_to_zero": """
        SELECT amount_currency, sum(amount) AS total FROM ledger_entries
         GROUP BY amount_currency HAVING sum(amount) <> 0""",
    "journals_sum_to_zero": """
        SELECT journal_id, sum(amount) AS total FROM ledger_entries
         GROUP BY journal_id, amount_currency HAVING sum(amount) <> 0""",
    "journals_have_legs": """
        SELECT j.id AS journal_id, count(e.id) AS legs
          FROM ledger_journal j LEFT JOIN ledger_entries e ON e.journal_id = j.id
         GROUP BY j.id HAVING count(e.id) < 2""",
    "entries_have_one_currency": """
        SELECT e.id AS entry_id, e.amount_currency, a.currency AS account_currency, j.currency AS journal_currency
          FROM ledger_entries e
          LEFT JOIN ledger_account a ON a.id = e.account_id LEFT JOIN ledger_journal j ON j.id = e.journal_id
         WHERE a.currency IS DISTINCT FROM e.amount_currency OR j.currency IS DISTINCT FROM e.amount_currency""",
    "balances_equal_entries": """
        SELECT b.account_id, b.posted, coalesce(e.total, 0) AS entries
          FROM ledger_balance b
          LEFT JOIN (SELECT account_id, sum(amount) AS total FROM ledger_entries GROUP BY account_id) e
            ON e.account_id = b.account_id
         WHERE b.posted <> coalesce(e.total, 0)""",
    "held_equals_open_holds": """
        SELECT b.account_id, b.held, coalesce(h.total, 0) AS open_holds
          FROM ledger_balance b
          LEFT JOIN (SELECT account_id, sum(amount) AS total FROM ledger_hold WHERE state = 'open'
                      GROUP BY account_id) h ON h.account_id = b.account_id
         WHERE b.held <> coalesce(h.total, 0)""",
    "balances_above_floor": """
        SELECT account_id, posted, held, floor FROM ledger_balance WHERE posted - held < floor OR held < 0""",
    "wallets_have_balances": """
        SELECT a.id AS account_id, a.code, a.hot
          FROM ledger_account a LEFT JOIN ledger_balance b ON b.account_id = a.id
         WHERE a.hot = (b.account_id IS NOT NULL)""",
    "captured_holds_were_taken": """
        SELECT h.journal_id, h.account_id, h.captured, h.holds
          FROM (SELECT journal_id, account_id, sum(captured) AS captured, count(*) AS holds
                  FROM ledger_hold WHERE state = 'captured' GROUP BY journal_id, account_id) h
         WHERE h.captured > -(SELECT coalesce(sum(e.amount), 0) FROM ledger_entries e
                               WHERE e.journal_id = h.journal_id AND e.account_id = h.account_id)""",
    "reversals_undo": """
        SELECT r.id AS reversal_id, e.account_id, sum(e.amount) AS left_over
          FROM ledger_journal r JOIN ledger_entries e ON e.journal_id IN (r.id, r.reverses_id)
         WHERE r.reverses_id IS NOT NULL
         GROUP BY r.id, e.account_id HAVING sum(e.amount) <> 0""",
    "closed_periods_stay": """
        SELECT j.id AS journal_id, j.accounting_date, p.closed_through
          FROM ledger_journal j
          JOIN (SELECT *, lead(created_at, 1, 'infinity') OVER (ORDER BY id) AS replaced_at
                  FROM ledger_period_close) p
            ON j.accounting_date <= p.closed_through AND j.created_at > p.created_at
           AND j.created_at < p.replaced_at""",
    # A capture credits its account; what goes back is taken from it, and what it has not got is its owner's debt.
    "settlements_are_booked": """
        SELECT s.id AS settlement_id, s.kind, s.external_id, s.gross, s.journal_id
          FROM settlement s
         WHERE s.gross <> s.fee + s.net
            OR CASE WHEN s.kind IN ('refund', 'reversal') THEN -s.gross ELSE s.gross END IS DISTINCT FROM (
                   SELECT sum(e.amount) FROM ledger_entries e JOIN ledger_account a ON a.id = e.account_id
                    WHERE e.journal_id = s.journal_id
                      AND (e.account_id = s.account_id
                           OR s.kind IN ('refund', 'reversal') AND a.code = 'customer_receivable:' || s.account_id))""",
    "refunds_fit_their_captures": """
        SELECT c.id AS settlement_id, r.parent_external_id AS capture_id, c.gross, sum(r.sign * r.gross) AS refunded,
               c.fee, sum(r.sign * r.fee) AS fees_back
          FROM (SELECT *, CASE WHEN kind IN ('refund', 'reversal') THEN 1 ELSE -1 END AS sign FROM settlement) r
          LEFT JOIN settlement c ON c.provider = r.provider AND c.kind = 'capture'
                                AND c.external_id = r.parent_external_id AND c.currency = r.currency
                                AND c.account_id = r.account_id
         WHERE r.kind IN ('refund', 'reversal', 'reversal_cancelled', 'refund_failed')
         GROUP BY c.id, r.provider, r.parent_external_id
        HAVING c.id IS NULL OR sum(r.sign * r.gross) NOT BETWEEN 0 AND c.gross
            OR sum(r.sign * r.fee) NOT BETWEEN 0 AND c.fee""",
    "refunds_do_not_stay_parked": """
        SELECT p.id AS parked_id, p.external_id, p.capture_id, p.error
          FROM ledger_parked_refund p
          LEFT JOIN settlement c
            ON c.provider = p.provider AND c.kind = 'capture' AND c.external_id = p.capture_id
          LEFT JOIN settlement r
            ON r.provider = p.provider AND r.external_id = p.external_id
           AND (r.kind = p.kind OR r.kind IN ('refund', 'reversal') AND p.kind IN ('refund', 'reversal'))
         WHERE (p.applied_at IS NULL AND (p.error <> '' OR c.id IS NOT NULL AND p.kind IN ('refund', 'reversal')))
            OR (p.applied_at IS NOT NULL AND r.id IS NULL)""",
    "captures_have_settlements": """
        SELECT j.id AS journal_id, j.idem_key AS external_id
          FROM ledger_journal j LEFT JOIN settlement s ON s.journal_id = j.id
         WHERE s.id IS NULL
           AND (j.idem_scope = 'bank.payout' OR j.idem_scope LIKE 'paypal.%')""",
    "top_ups_are_settled": """
        SELECT t.id AS top_up_id, t.state, count(s.id) AS settlements
          FROM ledger_top_up t LEFT JOIN settlement s ON s.top_up_id = t.id
         GROUP BY t.id HAVING (t.state = 'settled') <> (count(s.id) > 0)""",
    "debts_are_not_overpaid": """
        SELECT a.id AS account_id, a.code, sum(e.amount) AS overpaid
          FROM ledger_account a JOIN ledger_entries e ON e.account_id = a.id
         WHERE a.code LIKE 'customer\\_receivable:%' GROUP BY a.id HAVING sum(e.amount) > 0""",
}
_CHECKS.update(HISTORY_CHECKS)
LEDGER_CHECKS = frozenset(_CHECKS)  # without those that other rooms register


@dataclass(frozen=True, slots=True)
class Result:
    """`rows` are the first of those that break the check, as column -> value."""

    name: str
    ok: bool
    rows: list[dict[str, Any]]


def register_check(name: str, sql: str) -> None:
    """Adds a check of another room: one SELECT that returns what is wrong. Called from AppConfig.ready."""
    if _CHECKS.get(name, sql) != sql:
        raise ValueError(f"there is another check called {name!r}")
    _CHECKS[name] = sql


def verify_books() -> list[Result]:
    """Runs every check on one snapshot of the database."""
    with transaction.atomic(), connection.cursor() as cursor:
        if len(connection.savepoint_ids) == 0:
            cursor.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
        return [run_check(cursor, name, sql) for name, sql in _CHECKS.items()]


def run_check(cursor: Any, name: str, sql: str) -> Result:
    """Runs one SELECT that returns what is wrong, in the caller's transaction."""
    cursor.execute(f"SELECT * FROM ({sql}) AS wrong LIMIT {ROWS_SHOWN}")  # noqa: S608
    columns = [column.name for column in cursor.description]
    rows = [dict(zip(columns, row, strict=True)) for row in cursor.fetchall()]
    return Result(name, not rows, rows)
