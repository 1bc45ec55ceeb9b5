-- Posting. One order of locks everywhere: balance rows by account id, then journal and hold rows.

-- Books one journal; the way in for every function of this folder. Not for the application.
--
-- p_hold_id: the hold is resolved in the same transaction: captured is what its account's lines take, the
-- rest is released. With p_must_book a delivery has already happened: a hold that the clock closed, or one
-- that is smaller than the charge, does not stop it. What the wallet cannot pay above its floor is booked
-- as a debt, on the customer_receivable account of the wallet.
CREATE OR REPLACE FUNCTION ledger_book(
    p_scope text, p_key text, p_kind text, p_currency text, p_lines jsonb, p_actor text, p_meta jsonb,
    p_effective_at timestamptz, p_hold_id bigint, p_must_book boolean, p_reverses bigint,
    OUT journal_id bigint, OUT public_id uuid, OUT replayed boolean
)
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    label text := format('journal %s/%s', p_scope, p_key);
    accounts bigint[];
    amounts numeric[];
    account_texts text[];
    amount_texts text[];
    bad_line bigint;
    total numeric;
    asked bytea;
    locked bigint[];
    stranger bigint;
    foreigner bigint;
    closed bigint;
    hold ledger_hold;
    taken numeric;
    owing boolean := false;  -- whether the hold's account may be left owing
    wallet record;
    released numeric;
    available numeric;
    debt numeric;
BEGIN
    IF coalesce(p_scope, '') = '' OR length(p_scope) > 60 OR coalesce(p_key, '') = '' OR length(p_key) > 200 THEN
        RAISE EXCEPTION '%: scope (1 to 60 characters) and key (1 to 200) are needed', label
            USING ERRCODE = 'AX006';
    END IF;
    IF coalesce(p_kind, '') = '' OR length(p_kind) > 60 OR coalesce(p_actor, '') = '' OR length(p_actor) > 120 THEN
        RAISE EXCEPTION '%: kind (1 to 60 characters) and actor (1 to 120) are needed', label
            USING ERRCODE = 'AX006';
    END IF;
    IF p_currency IS NULL OR p_currency !~ '^[A-Z]{3}$' THEN
        RAISE EXCEPTION '%: currency must have three capital letters', label USING ERRCODE = 'AX006';
    END IF;
    IF jsonb_typeof(p_lines) IS DISTINCT FROM 'array' OR jsonb_array_length(p_lines) < 2 THEN
        RAISE EXCEPTION '%: lines must be a list of two or more', label USING ERRCODE = 'AX006';
    END IF;

    SELECT array_agg(line ->> 'account' ORDER BY n), array_agg(line ->> 'amount' ORDER BY n),
           min(n) FILTER (WHERE coalesce(line ->> 'account', '') !~ '^[0-9]{1,18}$'
                             OR coalesce(line ->> 'amount', '') !~ '^[+-]?[0-9]{1,15}(\.[0-9]{1,9})?$')
      INTO account_texts, amount_texts, bad_line
      FROM jsonb_array_elements(p_lines) WITH ORDINALITY AS l (line, n);
    IF bad_line IS NOT NULL THEN
        RAISE EXCEPTION '%: line % needs an account id and an amount with at most 15 + 9 digits', label, bad_line
            USING ERRCODE = 'AX006';
    END IF;
    accounts := account_texts::bigint[];
    amounts := amount_texts::numeric[];
    SELECT sum(amount),
           sha256(convert_to(
               string_agg(account || ' ' || trim_scale(amount), E'\n' ORDER BY account, amount), 'UTF8'))
      INTO total, asked
      FROM unnest(accounts, amounts) AS l (account, amount);
    IF total <> 0 THEN
        RAISE EXCEPTION '%: lines sum to %, not to zero', label, total USING ERRCODE = 'AX006';
    END IF;
    IF 0 = ANY (amounts) THEN
        RAISE EXCEPTION '%: a line of zero moves nothing', label USING ERRCODE = 'AX006';
    END IF;
    SELECT min(l.id) FILTER (WHERE a.id IS NULL), min(l.id) FILTER (WHERE a.currency <> p_currency),
           min(l.id) FILTER (WHERE a.closed_at IS NOT NULL), array_agg(l.id ORDER BY l.id) FILTER (WHERE NOT a.hot)
      INTO stranger, foreigner, closed, locked
      FROM (SELECT DISTINCT unnest(accounts) AS id) l LEFT JOIN ledger_account a ON a.id = l.id;
    IF stranger IS NOT NULL THEN
        RAISE EXCEPTION '%: there is no account %', label, stranger USING ERRCODE = 'AX006';
    END IF;
    IF foreigner IS NOT NULL THEN
        RAISE EXCEPTION '%: account % has another currency than %', label, foreigner, p_currency
            USING ERRCODE = 'AX006';
    END IF;

    PERFORM 1 FROM ledger_balance b WHERE b.account_id = ANY (locked) ORDER BY b.account_id FOR NO KEY UPDATE;

    INSERT INTO ledger_journal (public_id, kind, currency, idem_scope, idem_key, request_hash, effective_at,
                                reverses_id, actor, meta)
        VALUES (ledger_uuid7(), p_kind, p_currency, p_scope, p_key, asked,
                coalesce(p_effective_at, clock_timestamp()), p_reverses, p_actor, coalesce(p_meta, '{}'))
        ON CONFLICT (idem_scope, idem_key) DO NOTHING
        RETURNING id, ledger_journal.public_id INTO journal_id, public_id;
    IF NOT FOUND THEN
        SELECT r.journal_id, r.public_id INTO journal_id, public_id
          FROM ledger_replay(p_scope, p_key, p_kind, p_currency, asked, p_meta, p_effective_at) r;
        replayed := true;
        RETURN;
    END IF;
    replayed := false;
    IF closed IS NOT NULL THEN
        RAISE EXCEPTION '%: account % is closed', label, closed USING ERRCODE = 'AX006';
    END IF;

    IF p_hold_id IS NOT NULL THEN
        SELECT * INTO hold FROM ledger_hold h WHERE h.id = p_hold_id FOR NO KEY UPDATE;
        IF hold.id IS NULL THEN
            RAISE EXCEPTION '%: there is no hold %', label, p_hold_id USING ERRCODE = 'AX003';
        END IF;
        SELECT -sum(amount) INTO taken
          FROM unnest(accounts, amounts) AS l (account, amount) WHERE account = hold.account_id;
        IF taken IS NULL OR taken <= 0 THEN
            RAISE EXCEPTION '%: no line takes from account %, which hold % is on', label, hold.account_id, hold.id
                USING ERRCODE = 'AX006';
        END IF;
        IF p_must_book THEN
            owing := hold.state <> 'open' OR taken > hold.amount;
        ELSIF hold.state <> 'open' THEN
            RAISE EXCEPTION '%: hold % is %', label, hold.id, hold.state USING ERRCODE = 'AX003';
        ELSIF taken > hold.amount THEN
            RAISE EXCEPTION '%: % is more than hold % of %', label, taken, hold.id, hold.amount
                USING ERRCODE = 'AX004';
        END IF;
    END IF;

    FOR wallet IN
        SELECT b.account_id, b.posted, b.held, b.floor, l.delta
          FROM (SELECT account, sum(amount) AS delta
                  FROM unnest(accounts, amounts) AS l (account, amount) GROUP BY account) l
          JOIN ledger_balance b ON b.account_id = l.account
         ORDER BY b.account_id
    LOOP
        released := CASE WHEN hold.state = 'open' AND hold.account_id = wallet.account_id
                         THEN hold.amount ELSE 0 END;
        available := wallet.posted - wallet.held + released - wallet.floor;  -- NULL: no floor, no limit
        IF wallet.delta < 0 AND available + wallet.delta < 0 THEN
            IF NOT (owing AND hold.account_id = wallet.account_id) THEN
                RAISE EXCEPTION '%: account % has % available, % is required',
                    label, wallet.account_id, available, -wallet.delta
                    USING ERRCODE = 'AX001', DETAIL = json_build_object(
                        'available', available::text, 'required', (-wallet.delta)::text,
                        'shortfall', (-wallet.delta - available)::text)::text;
            END IF;
            debt := -wallet.delta - available;
            wallet.delta := -available;
            SELECT array_agg(account), array_agg(amount) INTO accounts, amounts
              FROM (SELECT account, amount FROM unnest(accounts, amounts) AS l (account, amount)
                     WHERE account <> wallet.account_id
                    UNION ALL SELECT wallet.account_id, wallet.delta WHERE wallet.delta <> 0
                    UNION ALL SELECT ledger_receivable_of(wallet.account_id), -debt) l;
        END IF;
        UPDATE ledger_balance b
           SET posted = b.posted + wallet.delta, held = b.held - released, version = b.version + 1
         WHERE b.account_id = wallet.account_id;
    END LOOP;

    UPDATE ledger_hold h
       SET state = 'captured', captured = least(taken, h.amount), journal_id = ledger_book.journal_id,
           closed_at = clock_timestamp()
     WHERE h.id = hold.id AND h.state = 'open';
    INSERT INTO ledger_entries (journal_id, account_id, amount, amount_currency)
        SELECT ledger_book.journal_id, account, amount, p_currency
          FROM unnest(accounts, amounts) WITH ORDINALITY AS l (account, amount, n) ORDER BY n;
END $$;

-- The journal under a key that is taken: the first result for the same request, AX002 for another one.
-- The actor is not part of the request: another worker may repeat it. A time counts when it was given.
CREATE OR REPLACE FUNCTION ledger_replay(
    p_scope text, p_key text, p_kind text, p_currency text, p_asked bytea, p_meta jsonb,
    p_effective_at timestamptz, OUT journal_id bigint, OUT public_id uuid
)
LANGUAGE plpgsql AS $$
DECLARE
    first ledger_journal;
    differing text[];
BEGIN
    SELECT * INTO STRICT first FROM ledger_journal j WHERE j.idem_scope = p_scope AND j.idem_key = p_key;
    differing := array_remove(ARRAY[
        CASE WHEN first.kind <> p_kind THEN 'kind' END,
        CASE WHEN first.currency <> p_currency THEN 'currency' END,
        CASE WHEN first.request_hash <> p_asked THEN 'lines' END,
        CASE WHEN first.meta <> coalesce(p_meta, '{}') THEN 'meta' END,
        CASE WHEN first.effective_at <> p_effective_at THEN 'effective_at' END
    ], NULL);
    IF differing <> '{}' THEN
        RAISE EXCEPTION 'journal %/% exists with another %', p_scope, p_key, array_to_string(differing, ', ')
            USING ERRCODE = 'AX002', DETAIL = to_json(differing)::text;
    END IF;
    journal_id := first.id;
    public_id := first.public_id;
END $$;

CREATE OR REPLACE FUNCTION ledger_post(
    p_scope text, p_key text, p_kind text, p_currency text, p_lines jsonb, p_actor text,
    p_meta jsonb DEFAULT '{}', p_effective_at timestamptz DEFAULT NULL
) RETURNS TABLE (journal_id bigint, public_id uuid, replayed boolean)
LANGUAGE sql SECURITY DEFINER SET search_path = public, pg_temp AS $$
    SELECT * FROM ledger_book(
        p_scope, p_key, p_kind, p_currency, p_lines, p_actor, p_meta, p_effective_at, NULL, false, NULL)
$$;

-- Many journals, all or none. Items: {scope, key, kind, currency, lines, actor, meta?, effective_at?,
-- capture_hold?}. An item with capture_hold is a delivery that has happened and is always booked.
CREATE OR REPLACE FUNCTION ledger_post_batch(p_journals jsonb)
RETURNS TABLE (ordinal int, journal_id bigint, replayed boolean)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = public, pg_temp AS $$
#variable_conflict use_column
DECLARE
    item record;
BEGIN
    IF jsonb_typeof(p_journals) IS DISTINCT FROM 'array' THEN
        RAISE EXCEPTION 'journals must be a list' USING ERRCODE = 'AX006';
    END IF;
    -- All wallets first and in order: journal by journal two batches could wait for each other.
    PERFORM 1 FROM ledger_balance b
      WHERE b.account_id IN (
          SELECT (line ->> 'account')::bigint
            FROM jsonb_array_elements(p_journals) AS i (journal),
                 jsonb_array_elements(CASE jsonb_typeof(journal -> 'lines')
                                      WHEN 'array' THEN journal -> 'lines' ELSE '[]' END) AS l (line)
           WHERE line ->> 'account' ~ '^[0-9]{1,18}$')
      ORDER BY b.account_id FOR NO KEY UPDATE;
    FOR item IN SELECT journal, n FROM jsonb_array_elements(p_journals) WITH ORDINALITY AS i (journal, n) LOOP
        IF coalesce(item.journal ->> 'capture_hold', '0') !~ '^[0-9]{1,18}$' THEN
            RAISE EXCEPTION 'journal %/%: capture_hold must be the id of a hold',
                item.journal ->> 'scope', item.journal ->> 'key' USING ERRCODE = 'AX006';
        END IF;
        ordinal := item.n;
        SELECT b.journal_id, b.replayed INTO journal_id, replayed
          FROM ledger_book(
              item.journal ->> 'scope', item.journal ->> 'key', item.journal ->> 'kind',
              item.journal ->> 'currency', item.journal -> 'lines', item.journal ->> 'actor',
              nullif(item.journal -> 'meta', 'null'), (item.journal ->> 'effective_at')::timestamptz,
              (item.journal ->> 'capture_hold')::bigint, true, NULL) b;
        RETURN NEXT;
    END LOOP;
END $$;

-- Takes a journal back by a new one with the opposite legs, once. Its wallets must be able to pay.
CREATE OR REPLACE FUNCTION reverse_journal(p_journal_id bigint, p_reason text, p_actor text)
RETURNS TABLE (journal_id bigint, public_id uuid, replayed boolean)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = public, pg_temp AS $$
#variable_conflict use_column
DECLARE
    original ledger_journal;
BEGIN
    SELECT * INTO original FROM ledger_journal j WHERE j.id = p_journal_id;
    IF original.id IS NULL THEN
        RAISE EXCEPTION 'there is no journal %', p_journal_id USING ERRCODE = 'AX006';
    END IF;
    IF original.reverses_id IS NOT NULL THEN
        RAISE EXCEPTION 'journal % is itself a reversal; post a new journal', p_journal_id USING ERRCODE = 'AX006';
    END IF;
    IF coalesce(p_reason, '') = '' THEN
        RAISE EXCEPTION 'reversal of journal %: a reason is needed', p_journal_id USING ERRCODE = 'AX006';
    END IF;
    RETURN QUERY SELECT * FROM ledger_book(
        'reversal', p_journal_id::text, 'reversal', original.currency,
        (SELECT jsonb_agg(jsonb_build_object('account', e.account_id, 'amount', -e.amount) ORDER BY e.id)
           FROM ledger_entries e WHERE e.journal_id = p_journal_id),
        p_actor, jsonb_build_object('reason', p_reason), NULL, NULL, false, p_journal_id);
END $$;
