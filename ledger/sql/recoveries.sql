-- Money of a capture that came back to us after it was taken, once per (provider, kind, external_id).
--
-- Kinds: `reversal_cancelled` (the provider gave back what it took) and `refund_failed` (a refund that was
-- booked did not reach the payer; its external id is that refund's). Gross R with fee f, which the provider
-- takes again: debit clearing R - f and processor fees f, credit the wallet R. The debt that the reversal may
-- have left is paid out of it at once, so that the books are the same whatever was spent or bought between.
-- One that is told before the money was taken is parked until then.
CREATE OR REPLACE FUNCTION settle_recovery(
    p_provider text, p_kind text, p_external_id text, p_capture_id text, p_currency text, p_gross numeric,
    p_fee numeric, p_actor text, p_effective_at timestamptz,
    OUT settlement_id bigint, OUT journal_id bigint, OUT replayed boolean, OUT parked boolean
)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = public, pg_temp AS $$
#variable_conflict use_column
DECLARE
    label text := format('%s %s of capture %s', p_kind, p_external_id, p_capture_id);
    capture settlement;
    first settlement;
    waiting ledger_parked_refund;
    gone record;
    clearing bigint;
    fees bigint;
    effective_at timestamptz := p_effective_at;
BEGIN
    IF p_kind IS NULL OR p_kind NOT IN ('reversal_cancelled', 'refund_failed') THEN
        RAISE EXCEPTION '%: unknown kind "%"', label, p_kind USING ERRCODE = 'AX006';
    END IF;
    IF coalesce(p_external_id, '') = '' OR coalesce(p_capture_id, '') = '' OR coalesce(p_actor, '') = '' THEN
        RAISE EXCEPTION '%: its id, its capture and the actor are needed', label USING ERRCODE = 'AX006';
    END IF;
    IF p_gross IS NULL OR p_fee IS NULL OR NOT (p_fee >= 0 AND p_fee < p_gross AND p_gross < 1e15)
        OR p_gross <> round(p_gross, 9) OR p_fee <> round(p_fee, 9)
    THEN
        RAISE EXCEPTION '%: gross must be above the fee, and that not below zero', label USING ERRCODE = 'AX006';
    END IF;
    replayed := false;
    parked := false;
    PERFORM ledger_lock_capture(p_provider, p_capture_id);

    SELECT * INTO first FROM settlement s
     WHERE s.provider = p_provider AND s.kind = p_kind AND s.external_id = p_external_id;
    IF FOUND THEN
        PERFORM ledger_same_refund(label, first.parent_external_id, first.currency, first.gross, first.fee,
                                   p_capture_id, p_currency, p_gross, p_fee);
        settlement_id := first.id;
        journal_id := first.journal_id;
        replayed := true;
        RETURN;
    END IF;
    SELECT * INTO capture FROM settlement s
     WHERE s.provider = p_provider AND s.kind = 'capture' AND s.external_id = p_capture_id;
    IF FOUND AND capture.currency IS DISTINCT FROM p_currency THEN
        RAISE EXCEPTION '%: the capture is in %, not in %', label, capture.currency, p_currency USING ERRCODE = 'AX006';
    END IF;
    SELECT * INTO gone FROM ledger_gone_back(p_provider, p_capture_id);
    IF p_gross > gone.gross OR p_fee > gone.fee THEN
        SELECT * INTO waiting FROM ledger_parked_refund r
         WHERE r.provider = p_provider AND r.kind = p_kind AND r.external_id = p_external_id;
        IF NOT FOUND THEN
            PERFORM ledger_park(p_provider, p_kind, p_external_id, p_capture_id, p_currency, p_gross, p_fee, p_actor,
                                p_effective_at);
        ELSE
            replayed := true;
            PERFORM ledger_same_refund(label, waiting.capture_id, waiting.currency, waiting.gross, waiting.fee,
                                       p_capture_id, p_currency, p_gross, p_fee);
        END IF;
        parked := true;
        RETURN;
    END IF;

    SELECT w.clearing, w.fees INTO clearing, fees FROM ledger_way_of(capture.journal_id) w;
    IF (p_effective_at AT TIME ZONE 'UTC')::date <= ledger_closed_through() THEN
        effective_at := NULL;
    END IF;
    SELECT b.journal_id INTO journal_id
      FROM ledger_book(
          p_provider || '.' || p_kind, p_external_id, p_kind, p_currency,
          (SELECT jsonb_agg(jsonb_build_object('account', account, 'amount', amount))
             FROM (VALUES (capture.account_id, p_gross), (clearing, p_fee - p_gross), (fees, -p_fee)) l (account, amount)
            WHERE amount <> 0),
          p_actor, jsonb_build_object('capture', p_capture_id, 'recovered_at', p_effective_at),
          effective_at, NULL, false, NULL) b;
    INSERT INTO settlement (provider, kind, external_id, parent_external_id, order_id, account_id, top_up_id,
                            gross, currency, fee, net, journal_id, occurred_at)
        VALUES (p_provider, p_kind, p_external_id, p_capture_id, capture.order_id, capture.account_id,
                capture.top_up_id, p_gross, p_currency, p_fee, p_gross - p_fee, settle_recovery.journal_id,
                p_effective_at)
        RETURNING id INTO settlement_id;
    UPDATE ledger_parked_refund r SET applied_at = clock_timestamp(), error = ''
     WHERE r.provider = p_provider AND r.kind = p_kind AND r.external_id = p_external_id;
    PERFORM ledger_collect_debt(capture.account_id, settlement_id, p_actor);
END $$;

-- Money between the platform's own accounts that somebody outside moved, once per (provider, kind, external_id):
-- credit p_account_id, debit p_counter_id. `withdrawal`: clearing to bank; `provider_fee`: clearing to an
-- expense; `dispute_held` and `dispute_freed`: clearing to what the provider withholds, and back; `payout`: bank
-- to what we owe a provider.
CREATE OR REPLACE FUNCTION settle_transfer(
    p_provider text, p_kind text, p_external_id text, p_account_id bigint, p_counter_id bigint, p_currency text,
    p_gross numeric, p_actor text, p_meta jsonb, p_effective_at timestamptz,
    OUT settlement_id bigint, OUT journal_id bigint, OUT replayed boolean
)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = public, pg_temp AS $$
#variable_conflict use_column
DECLARE
    first settlement;
    effective_at timestamptz := p_effective_at;
BEGIN
    IF p_kind IS NULL OR p_kind NOT IN ('withdrawal', 'provider_fee', 'dispute_held', 'dispute_freed', 'payout') OR coalesce(p_external_id, '') = ''
        OR coalesce(p_provider, '') = ''
    THEN
        RAISE EXCEPTION 'transfer %/%: provider, a known kind and an id are needed', p_kind, p_external_id
            USING ERRCODE = 'AX006';
    END IF;
    IF p_gross IS NULL OR NOT (p_gross > 0) THEN
        RAISE EXCEPTION '% %: the amount must be above zero', p_kind, p_external_id USING ERRCODE = 'AX006';
    END IF;
    IF (SELECT count(*) FROM ledger_account a WHERE a.id IN (p_account_id, p_counter_id) AND a.owner = 'platform') <> 2
    THEN
        RAISE EXCEPTION '% %: both accounts must be the platform''s own', p_kind, p_external_id USING ERRCODE = 'AX006';
    END IF;
    PERFORM ledger_lock_capture(p_provider, p_external_id);
    SELECT * INTO first FROM settlement s
     WHERE s.provider = p_provider AND s.kind = p_kind AND s.external_id = p_external_id;
    IF FOUND THEN
        PERFORM ledger_same_refund(p_kind || ' ' || p_external_id, '', first.currency, first.gross, 0,
                                   '', p_currency, p_gross, 0);
        settlement_id := first.id;
        journal_id := first.journal_id;
        replayed := true;
        RETURN;
    END IF;
    IF (p_effective_at AT TIME ZONE 'UTC')::date <= ledger_closed_through() THEN
        effective_at := NULL;
    END IF;
    SELECT b.journal_id INTO journal_id
      FROM ledger_book(
          p_provider || '.' || p_kind, p_external_id, p_kind, p_currency,
          jsonb_build_array(jsonb_build_object('account', p_account_id, 'amount', p_gross),
                            jsonb_build_object('account', p_counter_id, 'amount', -p_gross)),
          p_actor, p_meta, effective_at, NULL, false, NULL) b;
    INSERT INTO settlement (provider, kind, external_id, parent_external_id, order_id, account_id, gross, currency,
                            fee, net, journal_id, occurred_at)
        VALUES (p_provider, p_kind, p_external_id, '', '', p_account_id, p_gross, p_currency, 0, p_gross,
                settle_transfer.journal_id, p_effective_at)
        RETURNING id INTO settlement_id;
    replayed := false;
END $$;
