-- Posting. One order of locks everywhere: balance rows by account id, then journal and hold rows.

-- The lines of a journal as arrays, in their order, and the hash of the request that they are. Raises AX006
-- for what is no posting. Not for the application.
CREATE OR REPLACE FUNCTION ledger_read_lines(
    p_label text, p_lines jsonb, OUT accounts bigint[], OUT amounts numeric[], OUT asked bytea
)
LANGUAGE plpgsql AS $$
DECLARE
    bad_line bigint;
    total numeric;
    lowest numeric;
BEGIN
    IF jsonb_typeof(p_lines) IS DISTINCT FROM 'array' OR jsonb_array_length(p_lines) < 2 THEN
        RAISE EXCEPTION '%: lines must be a list of two or more', p_label USING ERRCODE = 'AX006';
    END IF;
    SELECT array_agg(account ORDER BY n), array_agg(amount ORDER BY n), min(n) FILTER (WHERE amount IS NULL),
           sum(amount), min(abs(amount)),
           sha256(convert_to(
               string_agg(account || ' ' || trim_scale(amount), E'\n' ORDER BY account, amount), 'UTF8'))
      INTO accounts, amounts, bad_line, total, lowest, asked
      FROM (SELECT n, CASE WHEN good THEN account::bigint END AS account,
                   CASE WHEN good THEN amount::numeric END AS amount
              FROM (SELECT n, line ->> 'account' AS account, line ->> 'amount' AS amount,
                           line ->> 'account' ~ '^[0-9]{1,18}$'
                           AND line ->> 'amount' ~ '^[+-]?[0-9]{1,15}(\.[0-9]{1,9})?$' AS good
                      FROM jsonb_array_elements(p_lines) WITH ORDINALITY AS l (line, n)) texts) l;
    IF bad_line IS NOT NULL THEN
        RAISE EXCEPTION '%: line % needs an account id and an amount with at most 15 + 9 digits', p_label, bad_line
            USING ERRCODE = 'AX006';
    END IF;
    IF total <> 0 THEN
        RAISE EXCEPTION '%: lines sum to %, not to zero', p_label, total USING ERRCODE = 'AX006';
    END IF;
    IF lowest = 0 THEN
        RAISE EXCEPTION '%: a line of zero moves nothing', p_label USING ERRCODE = 'AX006';
    END IF;
END $$;

-- Books one journal; the way in for every function of this folder. Not for the application.
--
-- p_hold_id: the hold is resolved in the same transaction: captured is what its account's lines take, the
-- rest is released. With p_must_book a delivery has already happened: a hold that the clock closed, or one
-- that is smaller than the charge, does not stop it. What the wallet cannot pay above its floor is booked
-- as a debt, on the customer_receivable account of the wallet. Without a hold that is so for every wallet.
-- p_terms: {kind, priority, expires_at, note} of the credit grant that the journal makes on its wallet.
-- p_grant_id: what wallets pay comes out of this grant; p_paid_only: out of no grant at all.
DROP FUNCTION IF EXISTS ledger_book(
    text, text, text, text, jsonb, text, jsonb, timestamptz, bigint, boolean, bigint);
CREATE OR REPLACE FUNCTION ledger_book(
    p_scope text, p_key text, p_kind text, p_currency text, p_lines jsonb, p_actor text, p_meta jsonb,
    p_effective_at timestamptz, p_hold_id bigint, p_must_book boolean, p_reverses bigint,
    p_terms jsonb DEFAULT NULL, p_grant_id bigint DEFAULT NULL, p_paid_only boolean DEFAULT false,
    p_group uuid DEFAULT NULL,
    OUT journal_id bigint, OUT public_id uuid, OUT replayed boolean
)
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    label text := format('journal %s/%s', p_scope, p_key);
    accounts bigint[];
    amounts numeric[];
    asked bytea;
    locked bigint[];
    stranger bigint;
    foreigner bigint;
    closed bigint;
    hold ledger_hold;
    taken numeric;
    owing boolean := false;  -- whether wallets (with a hold: its wallet) may be left owing
    wallets bigint[];
    posted numeric[];
    held numeric[];
    floors numeric[];
    granted numeric[];
    deltas numeric[];
    wallet_id bigint;
    delta numeric;
    released numeric;
    available numeric;
    debt numeric;
    grants_delta numeric;
    draw_at timestamptz;
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
    SELECT l.accounts, l.amounts, l.asked INTO accounts, amounts, asked FROM ledger_read_lines(label, p_lines) l;

    SELECT min(l.id) FILTER (WHERE a.id IS NULL), min(l.id) FILTER (WHERE a.currency <> p_currency),
           min(l.id) FILTER (WHERE a.closed_at IS NOT NULL), array_agg(l.id) FILTER (WHERE NOT a.hot)
      INTO stranger, foreigner, closed, locked
      FROM unnest(accounts) AS l (id) LEFT JOIN ledger_account a ON a.id = l.id;
    IF stranger IS NOT NULL THEN
        RAISE EXCEPTION '%: there is no account %', label, stranger USING ERRCODE = 'AX006';
    END IF;
    IF foreigner IS NOT NULL THEN
        RAISE EXCEPTION '%: account % has another currency than %', label, foreigner, p_currency
            USING ERRCODE = 'AX006';
    END IF;

    IF locked IS NOT NULL THEN
        SELECT array_agg(b.account_id), array_agg(b.posted), array_agg(b.held), array_agg(b.floor),
               array_agg(b.granted), array_agg(l.amount)
          INTO wallets, posted, held, floors, granted, deltas
          FROM (SELECT * FROM ledger_balance WHERE account_id = ANY (locked)
                 ORDER BY account_id FOR NO KEY UPDATE) b
          JOIN (SELECT account, sum(amount) AS amount FROM unnest(accounts, amounts) AS l (account, amount)
                 GROUP BY account) l ON l.account = b.account_id;
    END IF;

    INSERT INTO ledger_journal (public_id, kind, currency, idem_scope, idem_key, request_hash, effective_at,
                                reverses_id, group_id, actor, meta)
        VALUES (ledger_uuid7(), p_kind, p_currency, p_scope, p_key, asked,
                coalesce(p_effective_at, clock_timestamp()), p_reverses, p_group, p_actor, coalesce(p_meta, '{}'))
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
        taken := -deltas[array_position(wallets, hold.account_id)];
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
    ELSE
        owing := p_must_book;
    END IF;

    FOR i IN 1 .. coalesce(cardinality(wallets), 0) LOOP
        wallet_id := wallets[i];
        delta := deltas[i];
        grants_delta := 0;
        released := 0;
        draw_at := clock_timestamp();
        IF hold.state = 'open' AND hold.account_id = wallet_id THEN
            released := hold.amount;
            -- What an open hold has set aside does not expire under it.
            draw_at := hold.created_at;
        END IF;
        IF delta < 0 THEN
            available := posted[i] - held[i] + released - floors[i];  -- NULL: no floor, no limit
            IF p_grant_id IS NOT NULL THEN
                available := least(available, (SELECT g.remaining FROM credit_grant g
                                                WHERE g.id = p_grant_id AND g.account_id = wallet_id));
            ELSIF granted[i] > 0 THEN
                available := CASE WHEN p_paid_only THEN least(available, posted[i] - granted[i] - floors[i])
                                  ELSE available - grant_expired(wallet_id, draw_at) END;
            END IF;
            IF available + delta < 0 THEN
                IF NOT owing OR hold.account_id <> wallet_id THEN
                    RAISE EXCEPTION '%: account % has % available, % is required',
                        label, wallet_id, greatest(available, 0), -delta
                        USING ERRCODE = 'AX001', DETAIL = json_build_object(
                            'available', greatest(available, 0)::text, 'required', (-delta)::text,
                            'shortfall', (-delta - greatest(available, 0))::text)::text;
                END IF;
                debt := -delta - greatest(available, 0);
                delta := -greatest(available, 0);
                SELECT array_agg(account), array_agg(amount) INTO accounts, amounts
                  FROM (SELECT account, amount FROM unnest(accounts, amounts) AS l (account, amount)
                         WHERE account <> wallet_id
                        UNION ALL SELECT wallet_id, delta WHERE delta <> 0
                        UNION ALL SELECT ledger_receivable_of(wallet_id), -debt) l;
            END IF;
            IF granted[i] > 0 AND NOT p_paid_only THEN
                grants_delta := -grant_draw(wallet_id, journal_id, -delta, draw_at, p_grant_id);
            END IF;
        ELSIF p_reverses IS NOT NULL THEN
            grants_delta := grant_unwind(wallet_id, journal_id, p_reverses);
        ELSIF p_terms IS NOT NULL THEN
            grants_delta := grant_make(wallet_id, journal_id, delta, p_currency, p_terms);
        END IF;
        UPDATE ledger_balance b
           SET posted = b.posted + delta, held = b.held - released, granted = b.granted + grants_delta,
               version = b.version + 1
         WHERE b.account_id = wallet_id;
    END LOOP;

    IF hold.id IS NOT NULL THEN
        UPDATE ledger_hold h
           SET state = 'captured', captured = least(taken, h.amount), journal_id = ledger_book.journal_id,
               closed_at = clock_timestamp()
         WHERE h.id = hold.id AND h.state = 'open';
    END IF;
    -- The balance after a leg is counted back from the balance that the wallet has now.
    INSERT INTO ledger_entries (journal_id, account_id, amount, amount_currency, balance)
        SELECT ledger_book.journal_id, account, amount, p_currency,
               (SELECT b.posted FROM ledger_balance b WHERE b.account_id = account)
               + amount - sum(amount) OVER (PARTITION BY account ORDER BY n DESC)
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
LANGUAGE plpgsql SECURITY DEFINER SET search_path = public, pg_temp AS $$
#variable_conflict use_column
BEGIN
    SELECT * INTO journal_id, public_id, replayed
      FROM ledger_book(
          p_scope, p_key, p_kind, p_currency, p_lines, p_actor, p_meta, p_effective_at, NULL, false, NULL);
    RETURN NEXT;
END $$;
