-- Many journals, all or none. Items: {scope, key, kind, currency, lines, actor, meta?, effective_at?,
-- capture_hold?}. An item with capture_hold is a delivery that has happened and is always booked.
--
-- Nearly all journals of a batch are plain: new, well formed, on wallets without credit grants that can pay
-- them. Those are booked together, one statement per table. ledger_book has the other ones, one by one: it
-- alone knows debts, draws, replays, and how to refuse. A wallet's journals go one way or the other, all of
-- them, so each wallet still sees them in the order of the batch.
CREATE OR REPLACE FUNCTION ledger_post_batch(p_journals jsonb)
RETURNS TABLE (ordinal int, journal_id bigint, replayed boolean)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = public, pg_temp SET enable_seqscan = off SET plan_cache_mode = force_generic_plan AS $$
#variable_conflict use_column
DECLARE
    item record;
    plain int[];
    booked int[];
    ids bigint[];
BEGIN
    IF jsonb_typeof(p_journals) IS DISTINCT FROM 'array' THEN
        RAISE EXCEPTION 'journals must be a list' USING ERRCODE = 'AX006';
    END IF;
    FOR item IN
        SELECT i ->> 'scope' AS scope, i ->> 'key' AS key FROM jsonb_array_elements(p_journals) AS j (i)
         WHERE coalesce(i ->> 'capture_hold', '0') !~ '^[0-9]{1,18}$'
    LOOP
        RAISE EXCEPTION 'journal %/%: capture_hold must be the id of a hold', item.scope, item.key
            USING ERRCODE = 'AX006';
    END LOOP;
    -- All wallets first and in order: journal by journal two batches could wait for each other.
    PERFORM 1 FROM ledger_balance b
      WHERE b.account_id IN (
          SELECT (line ->> 'account')::bigint
            FROM jsonb_array_elements(p_journals) AS i (journal),
                 jsonb_array_elements(CASE jsonb_typeof(journal -> 'lines')
                                      WHEN 'array' THEN journal -> 'lines' ELSE '[]' END) AS l (line)
           WHERE line ->> 'account' ~ '^[0-9]{1,18}$')
      ORDER BY b.account_id FOR NO KEY UPDATE;

    plain := ledger_plain_journals(p_journals);
    IF cardinality(plain) > 0 THEN
        SELECT b.ordinals, b.journal_ids INTO booked, ids FROM ledger_book_plain(p_journals, plain) b;
        replayed := false;
        FOR ordinal, journal_id IN SELECT o, j FROM unnest(booked, ids) AS b (o, j) LOOP
            RETURN NEXT;
        END LOOP;
    END IF;
    FOR item IN
        SELECT journal, n FROM jsonb_array_elements(p_journals) WITH ORDINALITY AS i (journal, n)
         WHERE booked IS NULL OR n <> ALL (booked) ORDER BY n
    LOOP
        ordinal := item.n;
        SELECT b.journal_id, b.replayed INTO journal_id, replayed
          FROM ledger_book(
              item.journal ->> 'scope', item.journal ->> 'key', item.journal ->> 'kind',
              item.journal ->> 'currency', item.journal -> 'lines', item.journal ->> 'actor',
              nullif(item.journal -> 'meta', 'null'), (item.journal ->> 'effective_at')::timestamptz,
              (item.journal ->> 'capture_hold')::bigint, item.journal ->> 'capture_hold' IS NOT NULL, NULL) b;
        RETURN NEXT;
    END LOOP;
END $$;

-- The ordinals of the journals that can be booked together. The wallets are locked.
CREATE OR REPLACE FUNCTION ledger_plain_journals(p_journals jsonb, OUT plain int[])
LANGUAGE plpgsql AS $$
BEGIN
    WITH journals AS MATERIALIZED (
        SELECT n::int AS n, j ->> 'scope' AS scope, j ->> 'key' AS key, j ->> 'currency' AS currency,
               (j ->> 'capture_hold')::bigint AS hold_id, j -> 'lines' AS lines,
               length(j ->> 'scope') BETWEEN 1 AND 60 AND length(j ->> 'key') BETWEEN 1 AND 200
               AND length(j ->> 'kind') BETWEEN 1 AND 60 AND length(j ->> 'actor') BETWEEN 1 AND 120
               AND jsonb_typeof(j -> 'lines') = 'array' AND jsonb_array_length(j -> 'lines') >= 2 AS good,
               count(*) OVER (PARTITION BY j ->> 'scope', j ->> 'key') = 1
               AND count(j ->> 'capture_hold') OVER (PARTITION BY j ->> 'capture_hold') <= 1 AS alone
          FROM jsonb_array_elements(p_journals) WITH ORDINALITY AS i (j, n)
    ), lines AS MATERIALIZED (
        SELECT n, currency, hold_id, CASE WHEN readable THEN account::bigint END AS account,
               CASE WHEN readable THEN amount::numeric END AS amount
          FROM (SELECT j.n, j.currency, j.hold_id, l ->> 'account' AS account, l ->> 'amount' AS amount,
                       ledger_readable(l ->> 'account', l ->> 'amount') AS readable
                  FROM journals j, jsonb_array_elements(j.lines) AS e (l) WHERE j.good) texts
    ), sound AS MATERIALIZED (
        SELECT l.n
          FROM lines l LEFT JOIN ledger_account a ON a.id = l.account
         GROUP BY l.n
        HAVING sum(l.amount) = 0 AND bool_and(coalesce(l.amount <> 0 AND abs(l.amount) < 1e15 AND scale(l.amount) <= 9
                                                       AND a.currency = l.currency
                                                       AND a.closed_at IS NULL, false))
    ), moves AS MATERIALIZED (
        SELECT l.n, b.account_id, b.posted - b.held AS free, b.floor, b.granted, sum(l.amount) AS delta,
               h.id AS hold_id, h.amount AS hold_amount
          FROM lines l
          JOIN ledger_balance b ON b.account_id = l.account
          LEFT JOIN ledger_hold h ON h.id = l.hold_id AND h.account_id = l.account AND h.state = 'open'
         GROUP BY l.n, b.account_id, h.id
    ), running AS (
        SELECT m.*, m.free + sum(m.delta + coalesce(m.hold_amount, 0))
                                 OVER (PARTITION BY m.account_id ORDER BY m.n) AS after
          FROM moves m
    ), odd AS (
        SELECT j.n FROM journals j
         WHERE NOT coalesce(j.good AND j.alone, false) OR j.n NOT IN (SELECT s.n FROM sound s)
            OR EXISTS (SELECT 1 FROM ledger_journal o WHERE o.idem_scope = j.scope AND o.idem_key = j.key)
            OR j.hold_id IS NOT NULL AND NOT EXISTS (
                   SELECT 1 FROM moves m WHERE m.n = j.n AND m.hold_id IS NOT NULL
                      AND m.delta < 0 AND -m.delta <= m.hold_amount)
        UNION
        SELECT r.n FROM running r WHERE r.granted > 0 OR r.delta < 0 AND r.after < r.floor
    ), odd_wallets AS (
        SELECT m.account_id FROM moves m WHERE m.n IN (SELECT o.n FROM odd o)
    )
    SELECT CASE
        -- A journal that joins an odd wallet to others would make them odd too, and so on.
        WHEN EXISTS (SELECT 1 FROM moves m GROUP BY m.n
                     HAVING count(*) > 1 AND bool_or(m.account_id IN (SELECT w.account_id FROM odd_wallets w)))
        THEN '{}'::int[]
        ELSE ARRAY(SELECT j.n FROM journals j
                    WHERE j.n NOT IN (SELECT o.n FROM odd o)
                      AND j.n NOT IN (SELECT m.n FROM moves m
                                       WHERE m.account_id IN (SELECT w.account_id FROM odd_wallets w))
                    ORDER BY j.n)
        END INTO plain;
END $$;

-- Books these together; gives the ordinals of those that were booked, and their journals. Left out is one
-- whose key another transaction has taken in this very moment.
CREATE OR REPLACE FUNCTION ledger_book_plain(
    p_journals jsonb, p_plain int[], OUT ordinals int[], OUT journal_ids bigint[]
)
LANGUAGE plpgsql AS $$
DECLARE
    holds bigint[];
    made bigint[];
    line_of bigint[];  -- the journal of each line
    accounts bigint[];
    amounts numeric[];
    currencies text[];
BEGIN
    ordinals := p_plain;
    SELECT array_agg(nextval('ledger_journal_id_seq')) INTO journal_ids
      FROM generate_series(1, cardinality(ordinals));
    SELECT array_agg(journal_ids[i.k] ORDER BY i.k, l.m), array_agg((line ->> 'account')::bigint ORDER BY i.k, l.m),
           array_agg((line ->> 'amount')::numeric ORDER BY i.k, l.m),
           array_agg(p_journals -> (i.n - 1) ->> 'currency' ORDER BY i.k, l.m)
      INTO line_of, accounts, amounts, currencies
      FROM unnest(ordinals) WITH ORDINALITY AS i (n, k),
           jsonb_array_elements(p_journals -> (i.n - 1) -> 'lines') WITH ORDINALITY AS l (line, m);
    SELECT array_agg((p_journals -> (i.n - 1) ->> 'capture_hold')::bigint ORDER BY i.k) INTO holds
      FROM unnest(ordinals) WITH ORDINALITY AS i (n, k);

    WITH hashes AS (
        SELECT array_agg(hash ORDER BY id) AS of
          FROM (SELECT id, sha256(convert_to(
                           string_agg(account || ' ' || trim_scale(amount), E'\n' ORDER BY account, amount), 'UTF8')) AS hash
                  FROM unnest(line_of, accounts, amounts) AS l (id, account, amount) GROUP BY id) h
    ), inserted AS (
        INSERT INTO ledger_journal (id, public_id, kind, currency, idem_scope, idem_key, request_hash, effective_at,
                                    actor, meta)
            SELECT journal_ids[k], ledger_uuid7(), j ->> 'kind', j ->> 'currency', j ->> 'scope', j ->> 'key',
                   h.of[k], coalesce((j ->> 'effective_at')::timestamptz, clock_timestamp()), j ->> 'actor',
                   coalesce(nullif(j -> 'meta', 'null'), '{}')
              FROM hashes h,
                   (SELECT k, p_journals -> (n - 1) AS j FROM unnest(ordinals) WITH ORDINALITY AS i (n, k)) items
             ORDER BY k
            ON CONFLICT (idem_scope, idem_key) DO NOTHING RETURNING id
    )
    SELECT array_agg(id) INTO made FROM inserted;
    IF cardinality(made) IS DISTINCT FROM cardinality(journal_ids) THEN
        SELECT array_agg(o ORDER BY o), array_agg(j ORDER BY o), array_agg(h ORDER BY o)
          INTO ordinals, journal_ids, holds
          FROM unnest(ordinals, journal_ids, holds) AS i (o, j, h) WHERE j = ANY (made);
        SELECT array_agg(l.id ORDER BY o), array_agg(l.account ORDER BY o), array_agg(l.amount ORDER BY o),
               array_agg(l.currency ORDER BY o)
          INTO line_of, accounts, amounts, currencies
          FROM unnest(line_of, accounts, amounts, currencies) WITH ORDINALITY AS l (id, account, amount, currency, o)
         WHERE l.id = ANY (made);
    END IF;

    -- The balance after each leg is counted on from what is posted now.
    INSERT INTO ledger_entries (journal_id, account_id, amount, amount_currency, balance)
        SELECT l.id, l.account, l.amount, l.currency,
               (SELECT b.posted FROM ledger_balance b WHERE b.account_id = l.account)
               + sum(l.amount) OVER (PARTITION BY l.account ORDER BY l.o)
          FROM unnest(line_of, accounts, amounts, currencies) WITH ORDINALITY AS l (id, account, amount, currency, o)
         ORDER BY l.o;
    WITH held AS (
        UPDATE ledger_hold h
           SET state = 'captured', journal_id = c.id, closed_at = clock_timestamp(),
               captured = (SELECT -sum(l.amount) FROM unnest(line_of, accounts, amounts) AS l (id, account, amount)
                            WHERE l.id = c.id AND l.account = h.account_id)
          FROM unnest(journal_ids, holds) AS c (id, hold_id)
         WHERE h.id = c.hold_id AND h.state = 'open'
        RETURNING h.account_id, h.amount
    )
    UPDATE ledger_balance b
       SET posted = b.posted + w.delta, held = b.held - w.released, version = b.version + w.lines
      FROM (SELECT account, sum(delta) AS delta, sum(released) AS released, sum(lines) AS lines
              FROM (SELECT l.account, l.amount AS delta, 0 AS released, 1 AS lines
                      FROM unnest(accounts, amounts) AS l (account, amount)
                    UNION ALL SELECT account_id, 0, amount, 0 FROM held) moved
             GROUP BY account) w
     WHERE b.account_id = w.account;
END $$;
