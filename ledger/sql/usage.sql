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
               AND NOT usage_reversed(o.journal_id)
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
              LEFT JOIN usage_line o ON o.event_id = s.corrects AND o.account_id = s.account_id
                   AND NOT usage_reversed(o.journal_id)) compared;
    conflicting := coalesce(conflicting, '{}');
    orphans := coalesce(orphans, '{}');
    DELETE FROM pg_temp.usage_line_staging;
END $$;

-- Posts at most p_limit lines that are due, the oldest first; gives how many. Any number may run at once: each
-- leaves to the others what they have claimed. A delivery has happened: what a wallet cannot pay is its debt.
-- Corrections that give back have a journal of their own, and wait for what they correct. Lines of a closed wallet
-- wait until it is open again.
CREATE OR REPLACE FUNCTION usage_post(p_limit int, p_actor text) RETURNS int
LANGUAGE plpgsql SECURITY DEFINER SET search_path = public, pg_temp AS $$
DECLARE
    claimed bigint[];
    wallets bigint[];  -- of each journal to be, and whether that gives back
    backward boolean[];
    items jsonb;
    ordinals int[];
    journals bigint[];
BEGIN
    SELECT array_agg(id) INTO claimed
      FROM (SELECT l.id FROM usage_line l
             WHERE l.journal_id IS NULL AND l.charge <> 0
               AND NOT EXISTS (SELECT 1 FROM ledger_account a WHERE a.id = l.account_id AND a.closed_at IS NOT NULL)
             ORDER BY l.id LIMIT p_limit FOR NO KEY UPDATE OF l SKIP LOCKED) due;
    PERFORM 1 FROM ledger_balance b
      WHERE b.account_id IN (SELECT l.account_id FROM usage_line l WHERE l.id = ANY (claimed))
      ORDER BY b.account_id FOR NO KEY UPDATE;
    SELECT array_agg(l.id) INTO claimed
      FROM usage_line l
     WHERE l.id = ANY (claimed)
       AND (l.charge > 0 OR NOT EXISTS (SELECT 1 FROM usage_corrected(l.id) o
                                         WHERE o.charge <> 0 AND o.journal_id IS NULL AND o.line_id <> ALL (claimed)));
    PERFORM usage_revenue_open(ARRAY(SELECT DISTINCT l.amount_currency FROM usage_line l WHERE l.id = ANY (claimed)));
    SELECT array_agg(account_id ORDER BY back, account_id), array_agg(back ORDER BY back, account_id),
           jsonb_agg(item ORDER BY back, account_id)
      INTO wallets, backward, items
      FROM (SELECT l.account_id, l.charge < 0 AS back,
                   usage_item(l.account_id, l.amount_currency, sum(l.charge), min(l.id), max(l.id), count(*),
                              sum(l.quantity), CASE WHEN min(l.sku) = max(l.sku) THEN min(l.sku) END, p_actor, true) AS item
              FROM usage_line l WHERE l.id = ANY (claimed)
             GROUP BY l.account_id, l.amount_currency, l.charge < 0) netted;
    IF items IS NULL THEN
        RETURN 0;
    END IF;
    SELECT b.ordinals, b.journals INTO ordinals, journals FROM usage_book(items) b;
    UPDATE usage_line l SET journal_id = j.id
      FROM (SELECT wallets[n] AS account_id, backward[n] AS back, id FROM unnest(ordinals, journals) AS b (n, id)) j
     WHERE l.id = ANY (claimed) AND l.account_id = j.account_id AND (l.charge < 0) = j.back;
    PERFORM usage_give_back(wallets[n], id) FROM unnest(ordinals, journals) AS b (n, id) WHERE backward[n];
    RETURN cardinality(claimed);
END $$;

-- The legs of a charge: from the wallet to what the platform earns by usage.
CREATE OR REPLACE FUNCTION usage_legs(p_account_id bigint, p_currency text, p_amount numeric) RETURNS jsonb
LANGUAGE sql STABLE AS $$
    SELECT jsonb_build_array(jsonb_build_object('account', p_account_id, 'amount', trim_scale(-p_amount)),
                             jsonb_build_object('account', a.id, 'amount', trim_scale(p_amount)))
      FROM ledger_account a WHERE a.code = 'usage_revenue:' || p_currency
$$;

-- What a journal says about its lines. The sku only where all have the same.
CREATE OR REPLACE FUNCTION usage_meta(p_lines bigint, p_quantity numeric, p_sku text) RETURNS jsonb
LANGUAGE sql IMMUTABLE AS $$
    SELECT jsonb_strip_nulls(jsonb_build_object('lines', p_lines, 'quantity', trim_scale(p_quantity), 'sku', p_sku))
$$;

-- The journal of a wallet's lines, for usage_book. The sku only where all have the same. Kept apart are corrections
-- that give back. With p_held_for what the wallet cannot pay is its debt.
CREATE OR REPLACE FUNCTION usage_item(
    p_account_id bigint, p_currency text, p_charge numeric, p_first bigint, p_last bigint, p_lines bigint,
    p_quantity numeric, p_sku text, p_actor text, p_held_for boolean
) RETURNS jsonb
LANGUAGE sql STABLE AS $$
    SELECT jsonb_build_object(
        'scope', 'usage.tick', 'key', p_first || '-' || p_last || '.' || p_lines, 'actor', p_actor,
        'kind', CASE WHEN p_charge < 0 THEN 'usage_correction' ELSE 'usage' END, 'currency', p_currency,
        'lines', usage_legs(p_account_id, p_currency, p_charge), 'held_for', p_held_for,
        'meta', usage_meta(p_lines, p_quantity, p_sku))
$$;

-- Books these journals, whose wallets are locked: together where nothing speaks against it, the others one by one.
-- Gives the journal of each.
CREATE OR REPLACE FUNCTION usage_book(p_items jsonb, OUT ordinals int[], OUT journals bigint[])
LANGUAGE plpgsql AS $$
DECLARE
    plain int[] := ledger_plain_journals(p_items);
    item record;
    booked bigint;
BEGIN
    ordinals := '{}';
    journals := '{}';
    IF cardinality(plain) > 0 THEN
        SELECT b.ordinals, b.journal_ids INTO ordinals, journals FROM ledger_book_plain(p_items, plain) b;
    END IF;
    FOR item IN
        SELECT i, n FROM jsonb_array_elements(p_items) WITH ORDINALITY AS e (i, n) WHERE n <> ALL (ordinals) ORDER BY n
    LOOP
        SELECT b.journal_id INTO booked
          FROM ledger_book(item.i ->> 'scope', item.i ->> 'key', item.i ->> 'kind', item.i ->> 'currency',
                           item.i -> 'lines', item.i ->> 'actor', item.i -> 'meta', NULL, NULL,
                           (item.i ->> 'held_for')::boolean, NULL) b;
        ordinals := ordinals || item.n::int;
        journals := journals || booked;
    END LOOP;
END $$;

-- What the platform earns by usage, in each of these currencies.
CREATE OR REPLACE FUNCTION usage_revenue_open(p_currencies text[]) RETURNS void
LANGUAGE sql AS $$
    SELECT account_open('usage_revenue:' || c, 'platform', c, 'revenue', true) FROM unnest(p_currencies) AS c
$$;

-- Whether a journal was taken back. What its lines said is void then, and nothing is left of them to correct.
CREATE OR REPLACE FUNCTION usage_reversed(p_journal_id bigint) RETURNS boolean
LANGUAGE sql STABLE AS $$
    SELECT EXISTS (SELECT 1 FROM ledger_journal r WHERE r.reverses_id = p_journal_id)
$$;

-- The lines that a line corrects: the one before it, the one that this corrects, and so on.
CREATE OR REPLACE FUNCTION usage_corrected(p_line_id bigint)
RETURNS TABLE (line_id bigint, journal_id bigint, charge numeric, step int)
LANGUAGE sql STABLE AS $$
    WITH RECURSIVE earlier AS (
        SELECT o.id, o.journal_id, o.charge, o.corrects_id, 1 AS step
          FROM usage_line l JOIN usage_line o ON o.id = l.corrects_id WHERE l.id = p_line_id
        UNION ALL
        SELECT o.id, o.journal_id, o.charge, o.corrects_id, e.step + 1
          FROM earlier e JOIN usage_line o ON o.id = e.corrects_id
    )
    SELECT id, journal_id, charge, step FROM earlier
$$;
