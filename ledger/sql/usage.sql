-- Metered usage: what was delivered, line by line. A line is rated once and for all, and posted once: all that
-- are due are netted per wallet into one journal per currency and tick.

-- Half-even at 9 decimals: the amount of a quantity at a rate.
CREATE OR REPLACE FUNCTION usage_rate(p_quantity numeric, p_rate numeric) RETURNS numeric
LANGUAGE sql IMMUTABLE AS $$
    SELECT CASE WHEN abs(mod(p_quantity * p_rate * 1e9, 2)) = 0.5 THEN trunc(p_quantity * p_rate, 9)
                ELSE round(p_quantity * p_rate, 9) END
$$;

-- What was loaded becomes final, except that a line gets its journal, once.
CREATE OR REPLACE TRIGGER ledger_terms_final BEFORE UPDATE ON usage_line FOR EACH ROW
    WHEN (OLD.journal_id IS NOT NULL
          OR (OLD.id, OLD.event_id, OLD.account_id, OLD.sku, OLD.quantity, OLD.rate, OLD.amount, OLD.amount_currency,
              OLD.charge, OLD.corrects_id, OLD.occurred_at, OLD.received_at)
             IS DISTINCT FROM
             (NEW.id, NEW.event_id, NEW.account_id, NEW.sku, NEW.quantity, NEW.rate, NEW.amount, NEW.amount_currency,
              NEW.charge, NEW.corrects_id, NEW.occurred_at, NEW.received_at))
    EXECUTE FUNCTION ledger_refuse_change();
CREATE OR REPLACE TRIGGER ledger_rows_final BEFORE DELETE ON usage_line
    FOR EACH ROW EXECUTE FUNCTION ledger_refuse_change();
CREATE OR REPLACE TRIGGER ledger_table_final BEFORE TRUNCATE ON usage_line
    FOR EACH STATEMENT EXECUTE FUNCTION ledger_refuse_change();
ALTER TABLE usage_line ENABLE ALWAYS TRIGGER ledger_terms_final;
ALTER TABLE usage_line ENABLE ALWAYS TRIGGER ledger_rows_final;
ALTER TABLE usage_line ENABLE ALWAYS TRIGGER ledger_table_final;

-- Where a session copies its lines to: a temporary table of the owner's, which the application may only fill.
-- Another layout needs another name, as sessions outlive an upgrade. hold_id is for charges.sql.
CREATE OR REPLACE FUNCTION usage_stage() RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = public, pg_temp SET client_min_messages = warning AS $$
BEGIN
    IF to_regclass('pg_temp.usage_line_staging') IS NULL THEN
        CREATE TEMPORARY TABLE usage_line_staging (
            event_id text, account_id bigint, sku text, quantity numeric, rate numeric, amount numeric, currency text,
            corrects text, occurred_at timestamptz, hold_id bigint, line_id bigint, journal_id bigint
        ) ON COMMIT DELETE ROWS;
        EXECUTE format('GRANT INSERT ON pg_temp.usage_line_staging TO %I', session_user);
    END IF;
    PERFORM usage_staged();
END $$;

-- Refuses a table that somebody else has put there: a trigger on it would run with the owner's rights.
CREATE OR REPLACE FUNCTION usage_staged() RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    IF NOT EXISTS (SELECT 1 FROM pg_class c
                    WHERE c.oid = to_regclass('pg_temp.usage_line_staging') AND c.relowner = current_user::regrole)
    THEN
        RAISE EXCEPTION 'usage lines are copied into the table that usage_stage() makes' USING ERRCODE = 'AX006';
    END IF;
END $$;

-- Takes what the session has copied into usage_line_staging over into usage_line. Known are lines whose event was
-- loaded before with the same content; conflicting those with another one; orphans correct a line that is not
-- there (yet). The last two are left out and named. Corrections of this load count from its own lines too.
CREATE OR REPLACE FUNCTION usage_load(
    OUT loaded int, OUT known int, OUT conflicting text[], OUT orphans text[]
)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = public, pg_temp AS $$
DECLARE
    bad record;
BEGIN
    PERFORM usage_staged();
    SELECT s.event_id, a.id AS account_id INTO bad
      FROM pg_temp.usage_line_staging s LEFT JOIN ledger_balance b ON b.account_id = s.account_id
      LEFT JOIN ledger_account a ON a.id = b.account_id AND a.currency = s.currency
     WHERE (a.id IS NULL OR coalesce(s.event_id, '') = '' OR s.quantity IS NULL OR s.quantity < 0
            OR coalesce(s.amount, s.rate) IS NULL OR coalesce(s.amount, 0) < 0 OR coalesce(s.rate, 0) < 0)
     LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION 'usage line "%": an event id, a wallet in its currency, a quantity, and a rate or an amount'
            ' are needed, none of them below zero', bad.event_id USING ERRCODE = 'AX006';
    END IF;

    WITH fresh AS (
        INSERT INTO usage_line (event_id, account_id, sku, quantity, rate, amount, amount_currency, charge,
                                occurred_at, received_at)
            SELECT s.event_id, s.account_id, s.sku, s.quantity, s.rate,
                   coalesce(s.amount, usage_rate(s.quantity, s.rate)), s.currency,
                   coalesce(s.amount, usage_rate(s.quantity, s.rate)), s.occurred_at, clock_timestamp()
              FROM pg_temp.usage_line_staging s WHERE s.corrects IS NULL
            ON CONFLICT (event_id) DO NOTHING RETURNING 1
    )
    SELECT count(*) INTO loaded FROM fresh;
    -- A correction is charged what it differs from the line that it corrects; each line is corrected once.
    WITH fresh AS (
        INSERT INTO usage_line (event_id, account_id, sku, quantity, rate, amount, amount_currency, charge,
                                corrects_id, occurred_at, received_at)
            SELECT s.event_id, s.account_id, s.sku, s.quantity, s.rate,
                   coalesce(s.amount, usage_rate(s.quantity, s.rate)), s.currency,
                   coalesce(s.amount, usage_rate(s.quantity, s.rate)) - o.amount, o.id, s.occurred_at,
                   clock_timestamp()
              FROM pg_temp.usage_line_staging s
              JOIN usage_line o ON o.event_id = s.corrects AND o.account_id = s.account_id
            ON CONFLICT DO NOTHING RETURNING 1
    )
    SELECT loaded + count(*) INTO loaded FROM fresh;
    SELECT count(*) FILTER (WHERE same) - loaded, array_agg(event_id) FILTER (WHERE NOT same AND NOT orphan),
           array_agg(event_id) FILTER (WHERE orphan)
      INTO known, conflicting, orphans
      FROM (SELECT s.event_id, l.id IS NULL AND s.corrects IS NOT NULL AND o.id IS NULL AS orphan,
                   coalesce((l.account_id, l.sku, l.quantity, l.amount, l.amount_currency, l.occurred_at)
                            = (s.account_id, s.sku, s.quantity, coalesce(s.amount, usage_rate(s.quantity, s.rate)),
                               s.currency, s.occurred_at)
                            AND l.rate IS NOT DISTINCT FROM s.rate AND l.corrects_id IS NOT DISTINCT FROM o.id,
                            false) AS same
              FROM pg_temp.usage_line_staging s
              LEFT JOIN usage_line l ON l.event_id = s.event_id
              LEFT JOIN usage_line o ON o.event_id = s.corrects AND o.account_id = s.account_id) compared;
    conflicting := coalesce(conflicting, '{}');
    orphans := coalesce(orphans, '{}');
    DELETE FROM pg_temp.usage_line_staging;
END $$;

-- Posts at most p_limit lines that are due, the oldest first; gives how many. Any number may run at once: each
-- leaves to the others what they have claimed. A delivery has happened: what a wallet cannot pay is its debt.
CREATE OR REPLACE FUNCTION usage_post(p_limit int, p_actor text) RETURNS int
LANGUAGE plpgsql SECURITY DEFINER SET search_path = public, pg_temp AS $$
DECLARE
    tick record;
    claimed bigint[];
    booked bigint;
    posted int := 0;
BEGIN
    SELECT array_agg(id) INTO claimed
      FROM (SELECT l.id FROM usage_line l WHERE l.journal_id IS NULL AND l.charge <> 0
             ORDER BY l.id LIMIT p_limit FOR NO KEY UPDATE SKIP LOCKED) due;
    -- Wallets of all currencies first and in order, as ledger_book locks those of one journal only.
    PERFORM 1 FROM ledger_balance b
      WHERE b.account_id IN (SELECT l.account_id FROM usage_line l WHERE l.id = ANY (claimed))
      ORDER BY b.account_id FOR NO KEY UPDATE;
    FOR tick IN
        SELECT currency, sum(lines) AS lines, min(first) AS first, max(last) AS last, -sum(charge) AS total,
               jsonb_agg(jsonb_build_object('account', account_id, 'amount', trim_scale(-charge)))
                   FILTER (WHERE charge <> 0) AS wallets
          FROM (SELECT l.amount_currency AS currency, l.account_id, sum(l.charge) AS charge, count(*) AS lines,
                       min(l.id) AS first, max(l.id) AS last
                  FROM usage_line l WHERE l.id = ANY (claimed) GROUP BY l.amount_currency, l.account_id) netted
         GROUP BY currency ORDER BY currency
    LOOP
        -- Wallets that net to nothing: their lines wait for the next tick, in which something moves.
        CONTINUE WHEN tick.wallets IS NULL;
        SELECT b.journal_id INTO booked
          FROM ledger_book(
              'usage.tick', tick.first || '-' || tick.last || '.' || tick.lines, 'usage', tick.currency,
              tick.wallets || CASE WHEN tick.total = 0 THEN '[]'::jsonb ELSE jsonb_build_array(jsonb_build_object(
                  'account', account_open('usage_revenue:' || tick.currency, 'platform', tick.currency, 'revenue',
                                          true),
                  'amount', trim_scale(-tick.total))) END,
              p_actor, jsonb_build_object('lines', tick.lines), NULL, NULL, true, NULL) b;
        UPDATE usage_line l SET journal_id = booked
         WHERE l.id = ANY (claimed) AND l.amount_currency = tick.currency;
        posted := posted + tick.lines;
    END LOOP;
    RETURN posted;
END $$;
