"""What must be true between usage and the books. Run by `ledger_verify` with the ledger's own checks."""

from __future__ import annotations

from ledger.verify import register_check

_CHECKS = {
    # Both ways: an answer that was paid has its line in the ledger, and a line its answer. The ledger in turn proves
    # lines against journals (usage_equals_its_journals).
    "usage_matches_lines": """
        SELECT u.request_id, u.amount, u.journal_id, l.event_id, l.amount AS charged, l.journal_id AS charged_by
          FROM (SELECT request_id, 'answer:' || request_id AS event_id, amount, journal_id FROM usage_event
                 WHERE journal_id IS NOT NULL
                   AND journal_id NOT IN (SELECT id FROM ledger_journal WHERE idem_scope = 'usage')) u
          FULL JOIN (SELECT event_id, amount, journal_id FROM usage_line WHERE event_id LIKE 'answer:%') l
            ON l.event_id = u.event_id
         WHERE (u.amount, u.journal_id) IS DISTINCT FROM (l.amount, l.journal_id)""",
    # The same for answers of the time when each had a journal of its own, under scope 'usage'.
    "usage_matches_journals": """
        SELECT u.request_id, u.journal_id AS usage_journal, j.id AS journal_id, j.idem_key, u.amount, e.earned
          FROM ledger_journal j
          LEFT JOIN usage_event u ON u.request_id::text = j.idem_key
          LEFT JOIN LATERAL (SELECT sum(e.amount) AS earned
                               FROM ledger_entries e JOIN ledger_account a ON a.id = e.account_id
                              WHERE e.journal_id = j.id AND a.type = 'revenue') e ON true
         WHERE j.idem_scope = 'usage'
           AND (u.journal_id IS DISTINCT FROM j.id OR u.amount IS DISTINCT FROM e.earned
                OR EXISTS (SELECT 1 FROM usage_event o
                            WHERE o.journal_id = j.id AND o.request_id IS DISTINCT FROM u.request_id))""",
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
}


def register_checks() -> None:
    for name, query in _CHECKS.items():
        register_check(name, query)
