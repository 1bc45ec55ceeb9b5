"""Makes the balances again from the entries and holds, in a table of their own, and compares."""

from __future__ import annotations

from django.db import connection, transaction

from ledger.verify import Result, run_check

# `lowest` is the least a wallet ever had, journal by journal. A wallet's entries are numbered under the lock
# on its balance, so the order of their ids is the order in which they happened.
_REBUILD = """
CREATE TEMPORARY TABLE rebuilt_balance ON COMMIT DROP AS
    WITH moved AS (
        SELECT account_id, min(id) AS first_id, sum(amount) AS amount
          FROM ledger_entries GROUP BY account_id, journal_id
    ), running AS (
        SELECT account_id, amount, sum(amount) OVER (PARTITION BY account_id ORDER BY first_id) AS balance FROM moved
    ), summed AS (
        SELECT account_id, sum(amount) AS posted, min(balance) AS lowest FROM running GROUP BY account_id
    ), holds AS (
        SELECT account_id, sum(amount) AS held FROM ledger_hold WHERE state = 'open' GROUP BY account_id
    )
    SELECT a.id AS account_id, coalesce(s.posted, 0) AS posted, coalesce(h.held, 0) AS held,
           coalesce(s.lowest, 0) AS lowest
      FROM ledger_account a
      LEFT JOIN summed s ON s.account_id = a.id LEFT JOIN holds h ON h.account_id = a.id
     WHERE NOT a.hot
"""
# A floor is set when the wallet is opened and stays, so it counts for the whole history.
_DIFFERENCES = """
SELECT coalesce(r.account_id, b.account_id) AS account_id, b.posted, r.posted AS rebuilt_posted,
       b.held, r.held AS rebuilt_held, b.floor, r.lowest
  FROM rebuilt_balance r FULL JOIN ledger_balance b ON b.account_id = r.account_id
 WHERE b.posted IS DISTINCT FROM r.posted OR b.held IS DISTINCT FROM r.held OR r.lowest < b.floor
"""


def rebuild_and_compare() -> Result:
    """The check `rebuilt_balances`: what differs from ledger_balance. Reports; nothing is put right."""
    with transaction.atomic(), connection.cursor() as cursor:
        if len(connection.savepoint_ids) == 0:
            cursor.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        cursor.execute("DROP TABLE IF EXISTS pg_temp.rebuilt_balance")
        cursor.execute(_REBUILD)
        return run_check(cursor, "rebuilt_balances", _DIFFERENCES)
