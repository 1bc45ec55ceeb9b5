"""What must be true between usage and the books. Run by `ledger_verify` with the ledger's own checks."""

from __future__ import annotations

from ledger.verify import register_check

_CHECKS = {
    # Both ways: money that was taken has its usage, usage that was charged has its money.
    "usage_matches_journals": """
        SELECT u.request_id, u.journal_id AS usage_journal, j.id AS journal_id, j.idem_key
          FROM (SELECT request_id, request_id::text AS key, journal_id FROM usage_event
                 WHERE journal_id IS NOT NULL) u
          FULL JOIN (SELECT id, idem_key FROM ledger_journal WHERE idem_scope = 'usage') j ON j.idem_key = u.key
         WHERE j.id IS DISTINCT FROM u.journal_id""",
    # Half-even at 9 places: never more than half a step off, and on the half the even neighbour.
    "usage_amounts_are_rated": """
        SELECT request_id, amount, exact
          FROM (SELECT u.request_id, u.amount,
                       CASE WHEN u.completion_tokens = 0 THEN 0
                            ELSE u.prompt_tokens * p.prompt_rate + u.completion_tokens * p.completion_rate
                       END AS exact
                  FROM usage_event u JOIN brokerage_modelprice p ON p.id = u.price_id
                 WHERE u.charged_at IS NOT NULL) r
         WHERE abs(amount - exact) > 0.0000000005
            OR (abs(amount - exact) = 0.0000000005 AND mod(amount * 1000000000, 2) <> 0)""",
    # Each answer earns its own amount in its own journal, so none is charged twice.
    "usage_is_charged_once": """
        SELECT u.journal_id, count(DISTINCT u.request_id) AS answers, sum(u.amount) AS charged, max(e.earned) AS earned
          FROM usage_event u
          LEFT JOIN (SELECT e.journal_id, sum(e.amount) AS earned
                       FROM ledger_entries e JOIN ledger_account a ON a.id = e.account_id
                      WHERE a.type = 'revenue' GROUP BY e.journal_id) e ON e.journal_id = u.journal_id
         WHERE u.journal_id IS NOT NULL
         GROUP BY u.journal_id
        HAVING count(DISTINCT u.request_id) > 1 OR sum(u.amount) IS DISTINCT FROM max(e.earned)""",
}


def register_checks() -> None:
    for name, query in _CHECKS.items():
        register_check(name, query)
