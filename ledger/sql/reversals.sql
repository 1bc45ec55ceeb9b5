-- Takes a journal back by a new one with the opposite legs, once. Its wallets must be able to pay. What it
-- drew from credit grants goes back to them. Of an exchange both journals are taken back.
CREATE OR REPLACE FUNCTION reverse_journal(p_journal_id bigint, p_reason text, p_actor text)
RETURNS TABLE (journal_id bigint, public_id uuid, replayed boolean)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = public, pg_temp SET enable_seqscan = off SET plan_cache_mode = force_generic_plan AS $$
#variable_conflict use_column
DECLARE
    original ledger_journal;
    reversals uuid;
    made record;
    made_grant bigint;
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
    IF original.kind IN ('grant_expiry', 'grant_revocation', 'promo_recognition') THEN
        RAISE EXCEPTION 'journal % is a %: grant the credit anew', p_journal_id, original.kind
            USING ERRCODE = 'AX006';
    END IF;
    IF original.kind IN ('usage', 'usage_correction') THEN
        -- Whoever corrects its lines is through then.
        PERFORM 1 FROM ledger_balance b
          WHERE b.account_id IN (SELECT e.account_id FROM ledger_entries e WHERE e.journal_id = p_journal_id)
          ORDER BY b.account_id FOR NO KEY UPDATE;
        IF original.kind = 'usage_correction' OR EXISTS (
            SELECT 1 FROM usage_line l JOIN usage_line c ON c.corrects_id = l.id WHERE l.journal_id = p_journal_id)
        THEN
            RAISE EXCEPTION 'journal % has usage lines that correct others or were corrected: correct them again',
                p_journal_id USING ERRCODE = 'AX006';
        END IF;
    END IF;
    IF original.group_id IS NOT NULL THEN
        reversals := md5('reversal of ' || original.group_id)::uuid;
        PERFORM 1 FROM ledger_balance b
          WHERE b.account_id IN (SELECT e.account_id FROM ledger_entries e JOIN ledger_journal j ON j.id = e.journal_id
                                  WHERE j.group_id = original.group_id)
          ORDER BY b.account_id FOR NO KEY UPDATE;
    END IF;
    FOR original IN
        SELECT * FROM ledger_journal j
         WHERE j.id = p_journal_id OR j.group_id = original.group_id ORDER BY j.id <> p_journal_id
    LOOP
        SELECT g.id INTO made_grant FROM credit_grant g WHERE g.journal_id = original.id;
        SELECT b.* INTO made FROM ledger_book(
            'reversal', original.id::text, 'reversal', original.currency,
            (SELECT jsonb_agg(jsonb_build_object('account', e.account_id, 'amount', -e.amount) ORDER BY e.id)
               FROM ledger_entries e WHERE e.journal_id = original.id),
            p_actor, jsonb_build_object('reason', p_reason), NULL, NULL, false, original.id,
            NULL, made_grant, made_grant IS NULL, reversals) b;
        IF original.id = p_journal_id THEN
            journal_id := made.journal_id;
            public_id := made.public_id;
            replayed := made.replayed;
        END IF;
    END LOOP;
    RETURN NEXT;
END $$;

-- Money from one currency into another: two journals of one group, over the fx_brokerage account of each
-- currency, both or none. The rate is the caller's; it follows from the two amounts. Credit with terms is not
-- exchanged: it would lose them. One that is known late for its period belongs to the open one.
DROP FUNCTION IF EXISTS exchange_post(text, bigint, numeric, bigint, numeric, text, jsonb);
CREATE OR REPLACE FUNCTION exchange_post(
    p_key text, p_from_id bigint, p_from_amount numeric, p_to_id bigint, p_to_amount numeric, p_actor text,
    p_meta jsonb DEFAULT '{}', p_effective_at timestamptz DEFAULT NULL
) RETURNS TABLE (group_id uuid, from_journal_id bigint, to_journal_id bigint, replayed boolean)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = public, pg_temp SET enable_seqscan = off SET plan_cache_mode = force_generic_plan AS $$
#variable_conflict use_column
DECLARE
    source ledger_account;
    target ledger_account;
    effective_at timestamptz := CASE WHEN (p_effective_at AT TIME ZONE 'UTC')::date <= ledger_closed_through()
                                     THEN NULL ELSE p_effective_at END;
BEGIN
    IF p_from_amount IS NULL OR p_to_amount IS NULL OR NOT (p_from_amount > 0 AND p_to_amount > 0) THEN
        RAISE EXCEPTION 'exchange "%": both amounts must be above zero', p_key USING ERRCODE = 'AX006';
    END IF;
    SELECT * INTO source FROM ledger_account a WHERE a.id = p_from_id;
    SELECT * INTO target FROM ledger_account a WHERE a.id = p_to_id;
    IF source.id IS NULL OR target.id IS NULL OR source.currency = target.currency THEN
        RAISE EXCEPTION 'exchange "%": two accounts of different currencies are needed', p_key USING ERRCODE = 'AX006';
    END IF;
    PERFORM 1 FROM ledger_balance b WHERE b.account_id IN (p_from_id, p_to_id)
      ORDER BY b.account_id FOR NO KEY UPDATE;
    group_id := md5('exchange ' || p_key)::uuid;
    SELECT b.journal_id, b.replayed INTO from_journal_id, replayed
      FROM ledger_book(
          'exchange.from', p_key, 'exchange', source.currency,
          ledger_transfer(p_from_id, ledger_fx_account(source.currency), p_from_amount),
          p_actor, p_meta || jsonb_build_object('other', p_to_amount || ' ' || target.currency), effective_at, NULL, false,
          NULL, p_paid_only => true, p_group => group_id) b;
    SELECT b.journal_id INTO to_journal_id
      FROM ledger_book(
          'exchange.to', p_key, 'exchange', target.currency,
          ledger_transfer(ledger_fx_account(target.currency), p_to_id, p_to_amount),
          p_actor, p_meta || jsonb_build_object('other', p_from_amount || ' ' || source.currency), effective_at, NULL, false,
          NULL, p_group => group_id) b;
    RETURN NEXT;
END $$;

CREATE OR REPLACE FUNCTION ledger_fx_account(p_currency text) RETURNS bigint
LANGUAGE sql AS $$
    SELECT account_open('fx_brokerage:' || p_currency, 'platform', p_currency, 'asset', true)
$$;

-- The lines of a journal that moves an amount from one account to another.
CREATE OR REPLACE FUNCTION ledger_transfer(p_from_id bigint, p_to_id bigint, p_amount numeric) RETURNS jsonb
LANGUAGE sql IMMUTABLE AS $$
    SELECT jsonb_build_array(jsonb_build_object('account', p_from_id, 'amount', trim_scale(-p_amount)),
                             jsonb_build_object('account', p_to_id, 'amount', trim_scale(p_amount)))
$$;
