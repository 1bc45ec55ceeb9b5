-- Posting. One order of locks everywhere: balance rows by account id, then journal and hold rows.

-- Whether these are an account id and an amount. Length and size are looked at apart: a pattern that counts
-- is dear.
CREATE OR REPLACE FUNCTION ledger_readable(p_account text, p_amount text) RETURNS boolean
LANGUAGE sql IMMUTABLE AS $$
    SELECT length(p_account) <= 18 AND length(p_amount) <= 40
           AND p_account ~ '^[0-9]+$' AND p_amount ~ '^[+-]?[0-9]+(\.[0-9]+)?$'
$$;

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
    line record;
    accounts bigint[] := '{}';
    amounts numeric[] := '{}';
    balances numeric[] := '{}';
    texts text[] := '{}';
    asked bytea;
    moved bigint[] := '{}';  -- the accounts, each once, and what each of them gets
    moves numeric[] := '{}';
    total numeric := 0;
    zero boolean := false;
    bad_line bigint;
    stranger bigint;
    foreigner bigint;
    closed bigint;
    hold ledger_hold;
    taken numeric;
    owing boolean := false;  -- whether wallets (with a hold: its wallet) may be left owing
    wallet ledger_balance;
    wallets bigint[] := '{}';
    posted numeric[] := '{}';
    held numeric[] := '{}';
    floors numeric[] := '{}';
    granted numeric[] := '{}';
    deltas numeric[] := '{}';
    wallet_id bigint;
    delta numeric;
    released numeric;
    available numeric;
    debt numeric;
    releases numeric[] := '{}';
    grant_deltas numeric[] := '{}';
    draw_at timestamptz;
    place int;
BEGIN
    IF coalesce(p_scope, '') = '' OR length(p_scope) > 60 OR coalesce(p_key, '') = '' OR length(p_key) > 200 THEN
        RAISE EXCEPTION '%: scope (1 to 60 characters) and key (1 to 200) are needed', label
            USING ERRCODE = 'AX006';
    END IF;
    IF coalesce(p_kind, '') = '' OR length(p_kind) > 60 OR coalesce(p_actor, '') = '' OR length(p_actor) > 120 THEN
        RAISE EXCEPTION '%: kind (1 to 60 characters) and actor (1 to 120) are needed', label
            USING ERRCODE = 'AX006';
    END IF;
    IF jsonb_typeof(p_lines) IS DISTINCT FROM 'array' OR jsonb_array_length(p_lines) < 2 THEN
        RAISE EXCEPTION '%: lines must be a list of two or more', label USING ERRCODE = 'AX006';
    END IF;
    -- In the order of the accounts, whatever the order in which they came. Loops, as aggregates are dear to set up.
    FOR line IN
        SELECT l.n, l.account, l.amount, a.id, a.currency, a.closed_at
          FROM (SELECT n, CASE WHEN good THEN account::bigint END AS account,
                       CASE WHEN good THEN amount::numeric END AS amount
                  FROM (SELECT n, line ->> 'account' AS account, line ->> 'amount' AS amount,
                               ledger_readable(line ->> 'account', line ->> 'amount') AS good
                          FROM jsonb_array_elements(p_lines) WITH ORDINALITY AS l (line, n)) texts) l
          LEFT JOIN LATERAL (SELECT * FROM ledger_account o WHERE o.id = l.account LIMIT 1) a ON true
         ORDER BY l.account, l.amount
    LOOP
        IF line.amount IS NULL OR abs(line.amount) >= 1e15 OR scale(line.amount) > 9 THEN
            bad_line := least(bad_line, line.n);
        ELSIF line.id IS NULL THEN
            stranger := least(stranger, line.account);
        ELSIF line.currency <> p_currency THEN
            foreigner := least(foreigner, line.account);
        ELSIF line.closed_at IS NOT NULL THEN
            closed := least(closed, line.account);
        END IF;
        total := total + line.amount;
        zero := zero OR line.amount = 0;
        accounts := accounts || line.account;
        amounts := amounts || line.amount;
        texts := texts || (line.account || ' ' || trim_scale(line.amount));
        IF line.account = moved[cardinality(moved)] THEN
            moves[cardinality(moved)] := moves[cardinality(moved)] + line.amount;
        ELSE
            moved := moved || line.account;
            moves := moves || line.amount;
        END IF;
    END LOOP;
    asked := sha256(convert_to(array_to_string(texts, E'\n'), 'UTF8'));
    IF bad_line IS NOT NULL THEN
        RAISE EXCEPTION '%: line % needs an account id and an amount with at most 15 + 9 digits', label, bad_line
            USING ERRCODE = 'AX006';
    END IF;
    IF total <> 0 THEN
        RAISE EXCEPTION '%: lines sum to %, not to zero', label, total USING ERRCODE = 'AX006';
    END IF;
    IF zero THEN
        RAISE EXCEPTION '%: a line of zero moves nothing', label USING ERRCODE = 'AX006';
    END IF;
    IF stranger IS NOT NULL THEN
        RAISE EXCEPTION '%: there is no account %', label, stranger USING ERRCODE = 'AX006';
    END IF;
    IF p_currency IS NULL OR foreigner IS NOT NULL AND p_currency !~ '^[A-Z]{3}$' THEN
        RAISE EXCEPTION '%: currency must have three capital letters', label USING ERRCODE = 'AX006';
    END IF;
    IF foreigner IS NOT NULL THEN
        RAISE EXCEPTION '%: account % has another currency than %', label, foreigner, p_currency
            USING ERRCODE = 'AX006';
    END IF;

    FOR wallet IN
        SELECT * FROM ledger_balance b WHERE b.account_id = ANY (moved) ORDER BY b.account_id FOR NO KEY UPDATE
    LOOP
        wallets := wallets || wallet.account_id;
        posted := posted || wallet.posted;
        held := held || wallet.held;
        floors := floors || wallet.floor;
        granted := granted || wallet.granted;
        deltas := deltas || moves[array_position(moved, wallet.account_id)];
    END LOOP;

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

    FOR i IN 1 .. cardinality(wallets) LOOP
        wallet_id := wallets[i];
        delta := deltas[i];
        released := 0;
        grant_deltas[i] := 0;
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
            deltas[i] := delta;
            IF granted[i] > 0 AND NOT p_paid_only THEN
                grant_deltas[i] := -grant_draw(wallet_id, journal_id, -delta, draw_at, p_grant_id);
            END IF;
        ELSIF p_reverses IS NOT NULL THEN
            grant_deltas[i] := grant_unwind(wallet_id, journal_id, p_reverses);
        ELSIF p_terms IS NOT NULL THEN
            grant_deltas[i] := grant_make(wallet_id, journal_id, delta, p_currency, p_terms);
        END IF;
        releases[i] := released;
    END LOOP;
    UPDATE ledger_balance b
       SET posted = b.posted + w.delta, held = b.held - w.released, granted = b.granted + w.granted,
           version = b.version + 1
      FROM unnest(wallets, deltas, releases, grant_deltas) AS w (account, delta, released, granted)
     WHERE b.account_id = w.account;

    IF hold.id IS NOT NULL THEN
        UPDATE ledger_hold h
           SET state = 'captured', captured = least(taken, h.amount), journal_id = ledger_book.journal_id,
               closed_at = clock_timestamp()
         WHERE h.id = hold.id AND h.state = 'open';
    END IF;
    -- The legs on a wallet show what it has after them.
    FOR n IN 1 .. cardinality(accounts) LOOP
        place := array_position(wallets, accounts[n]);
        IF place IS NULL THEN
            balances[n] := NULL;
        ELSE
            posted[place] := posted[place] + amounts[n];
            balances[n] := posted[place];
        END IF;
    END LOOP;
    INSERT INTO ledger_entries (journal_id, account_id, amount, amount_currency, balance)
        SELECT ledger_book.journal_id, account, amount, p_currency, balance
          FROM unnest(accounts, amounts, balances) AS l (account, amount, balance);
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
LANGUAGE plpgsql SECURITY DEFINER SET search_path = public, pg_temp SET enable_seqscan = off SET plan_cache_mode = force_generic_plan AS $$
#variable_conflict use_column
BEGIN
    SELECT * INTO journal_id, public_id, replayed
      FROM ledger_book(
          p_scope, p_key, p_kind, p_currency, p_lines, p_actor, p_meta, p_effective_at, NULL, false, NULL);
    RETURN NEXT;
END $$;
