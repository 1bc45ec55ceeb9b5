"""What ledger_verify asks of histories: running balances, totals, exchanges, credit grants and their draws."""

HISTORY_CHECKS = {
    "running_balances_add_up": """
        SELECT entry_id, account_id, balance, total
          FROM (SELECT e.id AS entry_id, e.account_id, e.balance, b.account_id IS NULL AS hot,
                       sum(e.amount) OVER (PARTITION BY e.account_id ORDER BY e.id) AS total
                  FROM ledger_entries e LEFT JOIN ledger_balance b ON b.account_id = e.account_id) r
         WHERE balance IS DISTINCT FROM CASE WHEN NOT hot THEN total END""",
    "account_totals_equal_entries": """
        SELECT t.account_id, t.up_to_entry, t.posted, coalesce(sum(e.amount), 0) AS entries
          FROM ledger_account_total t
          LEFT JOIN ledger_entries e ON e.account_id = t.account_id AND e.id <= t.up_to_entry
         GROUP BY t.account_id HAVING t.posted <> coalesce(sum(e.amount), 0)""",
    "exchanges_are_pairs": """
        SELECT j.group_id, count(DISTINCT j.currency) AS currencies, count(*) AS journals
          FROM ledger_journal j
         WHERE j.group_id IS NOT NULL GROUP BY j.group_id
        HAVING count(*) <> 2 OR count(DISTINCT j.currency) <> 2 OR count(*) <> count(*) FILTER (WHERE EXISTS (
                   SELECT 1 FROM ledger_entries e JOIN ledger_account a ON a.id = e.account_id
                    WHERE e.journal_id = j.id AND a.code = 'fx_brokerage:' || j.currency))""",
    # Grants: what is left of each, what of a wallet they are, and that nobody draws on what is over.
    "grants_remain_what_was_not_used": """
        SELECT g.id AS grant_id, g.amount, g.remaining, coalesce(sum(u.amount), 0) AS used
          FROM credit_grant g LEFT JOIN grant_use u ON u.grant_id = g.id
         GROUP BY g.id HAVING g.remaining <> g.amount - coalesce(sum(u.amount), 0)""",
    "grants_are_part_of_their_wallet": """
        SELECT b.account_id, b.posted, b.granted, b.floor, coalesce(g.remaining, 0) AS remaining
          FROM ledger_balance b
          LEFT JOIN (SELECT account_id, sum(remaining) AS remaining FROM credit_grant GROUP BY account_id) g
            ON g.account_id = b.account_id
         WHERE b.granted <> coalesce(g.remaining, 0) OR b.posted - b.granted < b.floor""",
    "grants_are_booked": """
        SELECT g.id AS grant_id, g.amount, g.journal_id
          FROM credit_grant g
         WHERE g.amount IS DISTINCT FROM (SELECT sum(e.amount) FROM ledger_entries e
                                           WHERE e.journal_id = g.journal_id AND e.account_id = g.account_id)""",
    # A journal draws no more than its wallet pays, and gives back no more than the wallet gets.
    "draws_are_within_their_journals": """
        SELECT u.journal_id, g.account_id, sum(u.amount) AS drawn, max(e.taken) AS taken
          FROM grant_use u
          JOIN credit_grant g ON g.id = u.grant_id
          LEFT JOIN LATERAL (SELECT -sum(e.amount) AS taken FROM ledger_entries e
                              WHERE e.journal_id = u.journal_id AND e.account_id = g.account_id) e ON true
         GROUP BY u.journal_id, g.account_id
        HAVING sum(u.amount) NOT BETWEEN least(0, coalesce(max(e.taken), 0)) AND greatest(0, coalesce(max(e.taken), 0))""",
    "nothing_is_drawn_after_its_expiry": """
        SELECT u.id AS use_id, u.grant_id, g.expires_at, j.created_at
          FROM grant_use u
          JOIN credit_grant g ON g.id = u.grant_id JOIN ledger_journal j ON j.id = u.journal_id
         WHERE u.amount > 0 AND j.kind NOT IN ('grant_expiry', 'grant_revocation')
           AND coalesce((SELECT max(h.created_at) FROM ledger_hold h WHERE h.journal_id = j.id), j.created_at)
               >= g.expires_at""",
    "reversals_unwind_their_draws": """
        SELECT r.id AS reversal_id, u.grant_id, sum(u.amount) AS left_over
          FROM ledger_journal r
          JOIN grant_use u ON u.journal_id IN (r.id, r.reverses_id)
          JOIN credit_grant g ON g.id = u.grant_id
         WHERE r.reverses_id IS NOT NULL AND g.journal_id <> r.reverses_id
         GROUP BY r.id, u.grant_id HAVING sum(u.amount) <> 0""",
    "promotions_are_recognised_once": """
        SELECT a.currency, coalesce(r.booked, 0) AS booked, coalesce(g.recognised, 0) AS recognised
          FROM (SELECT DISTINCT currency FROM ledger_account) a
          LEFT JOIN (SELECT e.amount_currency AS currency, -sum(e.amount) AS booked
                       FROM ledger_entries e
                       JOIN ledger_journal j ON j.id = e.journal_id AND j.kind = 'promo_recognition'
                       JOIN ledger_account p ON p.id = e.account_id AND p.type = 'expense'
                      GROUP BY 1) r ON r.currency = a.currency
          LEFT JOIN (SELECT amount_currency AS currency, sum(recognised) AS recognised
                       FROM credit_grant GROUP BY 1) g ON g.currency = a.currency
         WHERE coalesce(r.booked, 0) <> coalesce(g.recognised, 0)""",
    # Completeness, both ways: each tick took from each wallet what its lines say, as money or as a debt.
    "usage_equals_its_journals": """
        SELECT coalesce(u.journal_id, e.journal_id) AS journal_id, coalesce(u.account_id, e.account_id) AS account_id,
               u.charge, e.taken
          FROM (SELECT journal_id, account_id, sum(charge) AS charge FROM usage_line
                 WHERE journal_id IS NOT NULL GROUP BY journal_id, account_id) u
          FULL JOIN (SELECT e.journal_id, -sum(e.amount) AS taken,
                            CASE WHEN a.code LIKE 'customer\\_receivable:%'
                                 THEN split_part(a.code, ':', 2)::bigint ELSE a.id END AS account_id
                       FROM ledger_entries e
                       JOIN ledger_journal j ON j.id = e.journal_id AND j.idem_scope = 'usage.tick'
                       JOIN ledger_account a ON a.id = e.account_id AND a.type <> 'revenue'
                      GROUP BY 1, 3) e ON e.journal_id = u.journal_id AND e.account_id = u.account_id
         WHERE coalesce(u.charge, 0) <> coalesce(e.taken, 0)""",
    # What is due is posted within seconds.
    "usage_does_not_wait": """
        SELECT id AS line_id, event_id, account_id, charge, received_at FROM usage_line
         WHERE journal_id IS NULL AND charge <> 0 AND received_at < clock_timestamp() - interval '1 hour'""",
    # Each correction gives back what it is worth, of no line more than that was charged. Those that were booked in one
    # journal with charges, before corrections had their own, gave back to the wallet only.
    "corrections_give_back_what_was_charged": """
        SELECT coalesce(c.id, r.id) AS line_id, c.charge, r.given
          FROM (SELECT l.id, l.charge FROM usage_line l JOIN ledger_journal j ON j.id = l.journal_id
                 WHERE j.kind = 'usage_correction') c
          FULL JOIN (SELECT correction_id AS id, sum(amount) AS given FROM usage_return GROUP BY correction_id) r
            ON r.id = c.id
         WHERE c.charge IS DISTINCT FROM -r.given
        UNION ALL
        SELECT l.id, l.charge, sum(r.amount)
          FROM usage_return r JOIN usage_line l ON l.id = r.line_id GROUP BY l.id HAVING sum(r.amount) > l.charge""",
    "usage_is_rated_once": """
        SELECT l.id AS line_id, l.event_id, l.quantity, l.rate, l.amount, l.charge, o.amount AS corrected
          FROM usage_line l LEFT JOIN usage_line o ON o.id = l.corrects_id
         WHERE abs(l.amount - l.quantity * l.rate) > 0.0000000005 OR l.charge <> l.amount - coalesce(o.amount, 0)""",
}
