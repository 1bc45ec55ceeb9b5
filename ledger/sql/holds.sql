-- Holds: credit set aside before work. available = posted - held - floor.

CREATE OR REPLACE FUNCTION hold_create(
    p_account_id bigint, p_amount numeric, p_currency text, p_key text, p_ttl interval, p_actor text
) RETURNS TABLE (hold_id bigint, replayed boolean, available numeric)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = public, pg_temp SET enable_seqscan = off SET plan_cache_mode = force_generic_plan AS $$
#variable_conflict use_column
DECLARE
    account ledger_account;
    balance ledger_balance;
    first ledger_hold;
    differing text[];
    made_at timestamptz := clock_timestamp();
BEGIN
    IF coalesce(p_key, '') = '' OR length(p_key) > 200 OR coalesce(p_actor, '') = '' OR length(p_actor) > 120 THEN
        RAISE EXCEPTION 'hold "%": key (1 to 200 characters) and actor (1 to 120) are needed', p_key
            USING ERRCODE = 'AX006';
    END IF;
    IF p_amount IS NULL OR NOT (p_amount > 0 AND p_amount < 1e15) OR p_amount <> round(p_amount, 9) THEN
        RAISE EXCEPTION 'hold "%": amount must be above zero, with at most 15 + 9 digits', p_key
            USING ERRCODE = 'AX006';
    END IF;
    IF p_ttl IS NULL OR p_ttl <= interval '0' THEN
        RAISE EXCEPTION 'hold "%": time to live must be above zero', p_key USING ERRCODE = 'AX006';
    END IF;
    SELECT * INTO balance FROM ledger_balance b WHERE b.account_id = p_account_id FOR NO KEY UPDATE;
    SELECT * INTO account FROM ledger_account a WHERE a.id = p_account_id;
    IF balance.account_id IS NULL OR account.currency IS DISTINCT FROM p_currency THEN
        RAISE EXCEPTION 'hold "%": account % is no wallet in %', p_key, p_account_id, p_currency
            USING ERRCODE = 'AX006';
    END IF;
    available := balance.posted - balance.held - balance.floor;
    IF balance.granted > 0 THEN
        available := greatest(0, available - grant_expired(p_account_id, made_at));
    END IF;

    INSERT INTO ledger_hold (account_id, amount, amount_currency, key, state, captured, actor, ttl, created_at,
                             expires_at)
        VALUES (p_account_id, p_amount, p_currency, p_key, 'open', 0, p_actor, p_ttl, made_at, made_at + p_ttl)
        ON CONFLICT (key) DO NOTHING RETURNING id INTO hold_id;
    IF NOT FOUND THEN
        SELECT * INTO STRICT first FROM ledger_hold h WHERE h.key = p_key;
        differing := array_remove(ARRAY[
            CASE WHEN first.account_id <> p_account_id THEN 'account' END,
            CASE WHEN first.amount <> p_amount THEN 'amount' END,
            CASE WHEN first.ttl <> p_ttl THEN 'ttl' END
        ], NULL);
        IF differing <> '{}' THEN
            RAISE EXCEPTION 'hold "%" exists with another %', p_key, array_to_string(differing, ', ')
                USING ERRCODE = 'AX002', DETAIL = to_json(differing)::text;
        END IF;
        hold_id := first.id;
        replayed := true;
        RETURN NEXT;
        RETURN;
    END IF;
    IF account.closed_at IS NOT NULL THEN
        RAISE EXCEPTION 'hold "%": account % is closed', p_key, p_account_id USING ERRCODE = 'AX006';
    END IF;
    IF available < p_amount THEN
        RAISE EXCEPTION 'hold "%": account % has % available, % is required',
            p_key, p_account_id, available, p_amount
            USING ERRCODE = 'AX001', DETAIL = json_build_object(
                'available', available::text, 'required', p_amount::text,
                'shortfall', (p_amount - available)::text)::text;
    END IF;
    UPDATE ledger_balance b SET held = b.held + p_amount, version = b.version + 1
     WHERE b.account_id = p_account_id;
    available := available - p_amount;
    replayed := false;
    RETURN NEXT;
END $$;

-- Posts a journal that takes from the hold's account and releases what it does not take. Strict: AX003
-- when the hold is not open, AX004 when the lines take more than it has.
CREATE OR REPLACE FUNCTION hold_capture(
    p_hold_id bigint, p_scope text, p_key text, p_kind text, p_currency text, p_lines jsonb, p_actor text,
    p_meta jsonb DEFAULT '{}', p_effective_at timestamptz DEFAULT NULL
) RETURNS TABLE (journal_id bigint, public_id uuid, replayed boolean)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = public, pg_temp SET enable_seqscan = off SET plan_cache_mode = force_generic_plan AS $$
BEGIN
    IF p_hold_id IS NULL THEN
        RAISE EXCEPTION 'journal %/%: there is no hold to capture', p_scope, p_key USING ERRCODE = 'AX003';
    END IF;
    RETURN QUERY SELECT * FROM ledger_book(
        p_scope, p_key, p_kind, p_currency, p_lines, p_actor, p_meta, p_effective_at, p_hold_id, false, NULL);
END $$;

-- Closes these holds as far as they are open, and gives their amounts back. Not for the application.
CREATE OR REPLACE FUNCTION ledger_release(p_hold_ids bigint[], p_state text) RETURNS int
LANGUAGE plpgsql AS $$
DECLARE
    released int;
BEGIN
    PERFORM 1 FROM ledger_balance b
      WHERE b.account_id IN (SELECT h.account_id FROM ledger_hold h WHERE h.id = ANY (p_hold_ids))
      ORDER BY b.account_id FOR NO KEY UPDATE;
    WITH closed AS (
        UPDATE ledger_hold h SET state = p_state, closed_at = clock_timestamp()
         WHERE h.id = ANY (p_hold_ids) AND h.state = 'open' RETURNING h.account_id, h.amount
    ), given_back AS (
        UPDATE ledger_balance b SET held = b.held - c.amount, version = b.version + 1
          FROM (SELECT account_id, sum(amount) AS amount FROM closed GROUP BY account_id) c
         WHERE b.account_id = c.account_id
    )
    SELECT count(*) INTO released FROM closed;
    RETURN released;
END $$;

-- True when this call closed it; false when it was closed already or does not exist.
CREATE OR REPLACE FUNCTION hold_void(p_hold_id bigint) RETURNS boolean
LANGUAGE sql SECURITY DEFINER SET search_path = public, pg_temp SET enable_seqscan = off SET plan_cache_mode = force_generic_plan AS $$
    SELECT ledger_release(ARRAY[p_hold_id], 'voided') = 1
$$;

CREATE OR REPLACE FUNCTION hold_void_by_key(p_key text) RETURNS boolean
LANGUAGE sql SECURITY DEFINER SET search_path = public, pg_temp SET enable_seqscan = off SET plan_cache_mode = force_generic_plan AS $$
    SELECT ledger_release(ARRAY(SELECT h.id FROM ledger_hold h WHERE h.key = p_key), 'voided') = 1
$$;

-- Releases at most p_limit holds whose time is over; returns how many.
CREATE OR REPLACE FUNCTION hold_expire_due(p_limit int) RETURNS int
LANGUAGE sql SECURITY DEFINER SET search_path = public, pg_temp SET enable_seqscan = off SET plan_cache_mode = force_generic_plan AS $$
    SELECT ledger_release(ARRAY(
        SELECT h.id FROM ledger_hold h
         WHERE h.state = 'open' AND h.expires_at <= clock_timestamp() ORDER BY h.expires_at LIMIT p_limit
    ), 'expired')
$$;
