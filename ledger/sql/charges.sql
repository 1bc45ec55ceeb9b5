-- Charging at delivery: rated lines in by COPY, out as one journal per wallet. The lines are final at once.

-- Charges what the session has copied into usage_line_staging, each event once: all of a wallet's lines are netted into
-- one journal. The hold of each line is captured, and what it held too much is released, in the same step, so there
-- is no moment in which something delivered is neither held nor charged. What was held for has been delivered: a hold
-- that the clock closed does not stop it, and what the wallet cannot pay becomes its debt. With a line that nothing was
-- held for, the wallet must be able to pay. All or none; gives the journal of each event, also of one that was charged
-- before.
CREATE OR REPLACE FUNCTION usage_charge(p_actor text) RETURNS TABLE (event_id text, journal_id bigint)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = public, pg_temp AS $$
#variable_conflict use_column
DECLARE
    item record;
    careful bigint[];
    lines bigint[];
    wallets bigint[];
    items jsonb;
    ordinals int[];
    journals bigint[] := '{}';
    booked bigint;
BEGIN
    PERFORM usage_charge_check();
    RETURN QUERY SELECT l.event_id::text, l.journal_id
                   FROM pg_temp.usage_line_staging s JOIN usage_line l ON l.event_id = s.event_id;
    DELETE FROM pg_temp.usage_line_staging s USING usage_line l WHERE l.event_id = s.event_id;
    UPDATE pg_temp.usage_line_staging SET line_id = nextval('usage_line_id_seq');
    PERFORM usage_revenue_open(ARRAY(SELECT DISTINCT currency FROM pg_temp.usage_line_staging));

    -- An open hold draws on grants as they stood when it was taken. Where one of them expires since then (or any
    -- moment now), a wallet's lines are booked one by one, each as of its own hold.
    SELECT coalesce(array_agg(DISTINCT s.account_id), '{}') INTO careful
      FROM pg_temp.usage_line_staging s
      JOIN ledger_hold h ON h.id = s.hold_id AND h.state = 'open'
      JOIN credit_grant g ON g.account_id = s.account_id AND g.remaining > 0
       AND g.expires_at > h.created_at AND g.expires_at <= clock_timestamp() + interval '1 minute';
    FOR item IN
        SELECT * FROM pg_temp.usage_line_staging s WHERE s.account_id = ANY (careful) ORDER BY s.account_id, s.line_id
    LOOP
        SELECT b.journal_id INTO booked
          FROM ledger_book('usage.tick', item.line_id || '-' || item.line_id || '.1', 'usage', item.currency,
                           usage_legs(item.account_id, item.currency, item.amount), p_actor,
                           usage_meta(1, item.quantity, item.sku), NULL, item.hold_id, item.hold_id IS NOT NULL, NULL) b;
        lines := lines || item.line_id;
        journals := journals || booked;
    END LOOP;
    UPDATE pg_temp.usage_line_staging s SET journal_id = j.id
      FROM unnest(lines, journals) AS j (line_id, id) WHERE s.line_id = j.line_id;

    WITH freed AS (
        SELECT h.account_id, sum(h.amount) AS amount
          FROM pg_temp.usage_line_staging s JOIN ledger_hold h ON h.id = s.hold_id AND h.state = 'open'
         WHERE s.journal_id IS NULL GROUP BY h.account_id
    )
    UPDATE ledger_balance b SET held = b.held - f.amount, version = b.version + 1
      FROM freed f WHERE b.account_id = f.account_id;
    SELECT array_agg(account_id ORDER BY account_id), jsonb_agg(item ORDER BY account_id) INTO wallets, items
      FROM (SELECT s.account_id,
                   usage_item(s.account_id, s.currency, sum(s.amount), min(s.line_id), max(s.line_id), count(*),
                              sum(s.quantity), CASE WHEN min(s.sku) = max(s.sku) THEN min(s.sku) END, p_actor,
                              bool_and(s.hold_id IS NOT NULL)) AS item
              FROM pg_temp.usage_line_staging s WHERE s.journal_id IS NULL GROUP BY s.account_id, s.currency) netted;
    IF items IS NOT NULL THEN
        SELECT b.ordinals, b.journals INTO ordinals, journals FROM usage_book(items) b;
        UPDATE pg_temp.usage_line_staging s SET journal_id = j.id
          FROM unnest(ordinals, journals) AS j (n, id)
         WHERE s.journal_id IS NULL AND s.account_id = wallets[j.n];
        UPDATE ledger_hold h
           SET state = 'captured', captured = least(s.amount, h.amount), journal_id = s.journal_id,
               closed_at = clock_timestamp()
          FROM pg_temp.usage_line_staging s WHERE h.id = s.hold_id AND h.state = 'open';
    END IF;

    INSERT INTO usage_line (id, event_id, account_id, sku, quantity, amount, amount_currency, charge, occurred_at,
                            received_at, journal_id)
        SELECT s.line_id, s.event_id, s.account_id, s.sku, s.quantity, s.amount, s.currency, s.amount, s.occurred_at,
               clock_timestamp(), s.journal_id
          FROM pg_temp.usage_line_staging s ORDER BY s.line_id;
    RETURN QUERY SELECT s.event_id, s.journal_id FROM pg_temp.usage_line_staging s;
    DELETE FROM pg_temp.usage_line_staging;
END $$;

-- Refuses lines that cannot be charged, and locks the wallets of those that can.
CREATE OR REPLACE FUNCTION usage_charge_check() RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    bad record;
BEGIN
    PERFORM usage_staged();
    SELECT s.event_id INTO bad
      FROM pg_temp.usage_line_staging s
      LEFT JOIN ledger_balance b ON b.account_id = s.account_id
      LEFT JOIN ledger_account a ON a.id = b.account_id AND a.currency = s.currency
     WHERE a.id IS NULL OR coalesce(s.event_id, '') = '' OR coalesce(s.sku, '') = '' OR s.occurred_at IS NULL
        OR s.corrects IS NOT NULL OR s.rate IS NOT NULL OR NOT coalesce(s.quantity >= 0, false)
        OR NOT coalesce(s.amount > 0 AND s.amount < 1e15 AND scale(s.amount) <= 9, false)
     LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION 'usage line "%": an event id, a wallet in its currency, a sku, a time, a quantity, and an amount'
            ' above zero with at most 15 + 9 digits are needed', bad.event_id USING ERRCODE = 'AX006';
    END IF;
    SELECT s.event_id INTO bad
      FROM (SELECT event_id, count(*) OVER (PARTITION BY event_id) > 1
                             OR count(hold_id) OVER (PARTITION BY hold_id) > 1 AS twice
              FROM pg_temp.usage_line_staging) s
     WHERE s.twice LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION 'usage line "%": it, or its hold, is told twice', bad.event_id USING ERRCODE = 'AX006';
    END IF;
    -- Before anything is looked up: whoever charges the same events is through then.
    PERFORM 1 FROM ledger_balance b
      WHERE b.account_id IN (SELECT s.account_id FROM pg_temp.usage_line_staging s)
      ORDER BY b.account_id FOR NO KEY UPDATE;
    SELECT s.event_id, s.hold_id INTO bad
      FROM pg_temp.usage_line_staging s LEFT JOIN ledger_hold h ON h.id = s.hold_id AND h.account_id = s.account_id
     WHERE s.hold_id IS NOT NULL AND h.id IS NULL LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION 'usage line "%": its wallet has no hold %', bad.event_id, bad.hold_id USING ERRCODE = 'AX003';
    END IF;
    SELECT s.event_id INTO bad
      FROM pg_temp.usage_line_staging s JOIN usage_line l ON l.event_id = s.event_id
     WHERE l.journal_id IS NULL
        OR (l.account_id, l.sku, l.quantity, l.amount) IS DISTINCT FROM (s.account_id, s.sku, s.quantity, s.amount)
     LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION 'usage line "%" exists with another content', bad.event_id
            USING ERRCODE = 'AX002', DETAIL = '["line"]';
    END IF;
END $$;
