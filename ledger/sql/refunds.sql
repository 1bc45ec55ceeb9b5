-- Money sent back, booked once per (provider, refund, external_id) whatever channel told us of it.
--
-- A refund of gross R of which the provider gives back the fee f: debit the wallet R, credit clearing R - f
-- and processor fees f. What the wallet has not got any more is its owner's debt, on customer_receivable.
-- A refund that is told before its capture is parked; booking the capture books it too. Refunds of one
-- capture never exceed it.
CREATE OR REPLACE FUNCTION settle_refund(
    p_provider text, p_external_id text, p_capture_id text, p_currency text, p_gross numeric, p_fee numeric,
    p_actor text, p_effective_at timestamptz,
    OUT settlement_id bigint, OUT journal_id bigint, OUT replayed boolean, OUT parked boolean
)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = public, pg_temp AS $$
#variable_conflict use_column
DECLARE
    label text := format('refund %s of capture %s', p_external_id, p_capture_id);
    capture settlement;
    first settlement;
    waiting ledger_parked_refund;
    clearing bigint;
    fees bigint;
    refunded numeric;
    fees_back numeric;
    available numeric;
    debt numeric;
    effective_at timestamptz := p_effective_at;
BEGIN
    IF coalesce(p_external_id, '') = '' OR coalesce(p_capture_id, '') = '' OR coalesce(p_actor, '') = '' THEN
        RAISE EXCEPTION '%: the ids of refund and capture, and the actor are needed', label USING ERRCODE = 'AX006';
    END IF;
    IF p_gross IS NULL OR p_fee IS NULL OR NOT (p_fee >= 0 AND p_fee < p_gross AND p_gross < 1e15)
        OR p_gross <> round(p_gross, 9) OR p_fee <> round(p_fee, 9)
    THEN
        RAISE EXCEPTION '%: gross must be above the fee given back, and that not below zero', label
            USING ERRCODE = 'AX006';
    END IF;
    replayed := false;
    parked := false;
    PERFORM ledger_lock_capture(p_provider, p_capture_id);

    SELECT * INTO capture FROM settlement s
     WHERE s.provider = p_provider AND s.kind = 'capture' AND s.external_id = p_capture_id;
    IF NOT FOUND THEN
        INSERT INTO ledger_parked_refund (provider, external_id, capture_id, currency, gross, fee, actor, effective_at,
                                          error)
            VALUES (p_provider, p_external_id, p_capture_id, p_currency, p_gross, p_fee, p_actor, p_effective_at, '')
            ON CONFLICT (provider, external_id) DO NOTHING;
        replayed := NOT FOUND;
        parked := true;
        SELECT * INTO STRICT waiting FROM ledger_parked_refund r
         WHERE r.provider = p_provider AND r.external_id = p_external_id;
        PERFORM ledger_same_refund(label, waiting.capture_id, waiting.currency, waiting.gross, waiting.fee,
                                   p_capture_id, p_currency, p_gross, p_fee);
        RETURN;
    END IF;
    PERFORM 1 FROM ledger_balance b WHERE b.account_id = capture.account_id FOR NO KEY UPDATE;
    SELECT * INTO first FROM settlement s
     WHERE s.provider = p_provider AND s.kind = 'refund' AND s.external_id = p_external_id;
    IF FOUND THEN
        PERFORM ledger_same_refund(label, first.parent_external_id, first.currency, first.gross, first.fee,
                                   p_capture_id, p_currency, p_gross, p_fee);
        settlement_id := first.id;
        journal_id := first.journal_id;
        replayed := true;
        RETURN;
    END IF;
    IF capture.currency IS DISTINCT FROM p_currency THEN
        RAISE EXCEPTION '%: the capture is in %, not in %', label, capture.currency, p_currency USING ERRCODE = 'AX006';
    END IF;
    SELECT coalesce(sum(s.gross), 0), coalesce(sum(s.fee), 0) INTO refunded, fees_back FROM settlement s
     WHERE s.provider = p_provider AND s.kind = 'refund' AND s.parent_external_id = p_capture_id;
    IF refunded + p_gross > capture.gross OR fees_back + p_fee > capture.fee THEN
        RAISE EXCEPTION '%: % with a fee of % is more than the % and % that are left of it',
            label, p_gross, p_fee, capture.gross - refunded, capture.fee - fees_back
            USING ERRCODE = 'AX006';
    END IF;

    -- The way back is the way the money came.
    SELECT min(a.id) FILTER (WHERE a.type = 'asset'), min(a.id) FILTER (WHERE a.type = 'expense')
      INTO clearing, fees
      FROM ledger_entries e JOIN ledger_account a ON a.id = e.account_id WHERE e.journal_id = capture.journal_id;
    SELECT greatest(0, b.posted - b.held - b.floor) INTO available
      FROM ledger_balance b WHERE b.account_id = capture.account_id;
    debt := greatest(0, p_gross - available);  -- NULL floor: no limit, no debt
    IF (p_effective_at AT TIME ZONE 'UTC')::date <= (SELECT max(closed_through) FROM ledger_period_close) THEN
        effective_at := NULL;
    END IF;
    SELECT b.journal_id INTO journal_id
      FROM ledger_book(
          p_provider || '.refund', p_external_id, 'refund', p_currency,
          (SELECT jsonb_agg(jsonb_build_object('account', account, 'amount', amount))
             FROM (VALUES (capture.account_id, debt - p_gross), (clearing, p_gross - p_fee), (fees, p_fee),
                          (CASE WHEN debt > 0 THEN ledger_receivable_of(capture.account_id) END, -debt)
                  ) l (account, amount)
            WHERE amount <> 0),
          p_actor, jsonb_build_object('capture', p_capture_id, 'refunded_at', p_effective_at),
          effective_at, NULL, false, NULL) b;
    INSERT INTO settlement (provider, kind, external_id, parent_external_id, order_id, account_id, top_up_id,
                            gross, currency, fee, net, journal_id)
        VALUES (p_provider, 'refund', p_external_id, p_capture_id, capture.order_id, capture.account_id,
                capture.top_up_id, p_gross, p_currency, p_fee, p_gross - p_fee, settle_refund.journal_id)
        RETURNING id INTO settlement_id;
    UPDATE ledger_parked_refund r SET applied_at = clock_timestamp(), error = ''
     WHERE r.provider = p_provider AND r.external_id = p_external_id;
END $$;

-- A capture and its refunds are booked one after the other: else a refund that finds no capture yet and a
-- capture that finds no refund yet could pass each other. Always the first lock of the transaction.
CREATE OR REPLACE FUNCTION ledger_lock_capture(p_provider text, p_capture_id text) RETURNS void LANGUAGE sql AS $$
    SELECT pg_advisory_xact_lock(hashtextextended(p_provider || ' ' || p_capture_id, 1))
$$;

CREATE OR REPLACE FUNCTION ledger_same_refund(
    p_label text, capture_id text, currency text, gross numeric, fee numeric,
    p_capture_id text, p_currency text, p_gross numeric, p_fee numeric
) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    differing text[] := array_remove(ARRAY[
        CASE WHEN capture_id <> p_capture_id THEN 'capture' END,
        CASE WHEN currency <> p_currency THEN 'currency' END,
        CASE WHEN gross <> p_gross THEN 'gross' END,
        CASE WHEN fee <> p_fee THEN 'fee' END
    ], NULL);
BEGIN
    IF differing <> '{}' THEN
        RAISE EXCEPTION '% exists with another %', p_label, array_to_string(differing, ', ')
            USING ERRCODE = 'AX002', DETAIL = to_json(differing)::text;
    END IF;
END $$;

-- Books the refunds that came before their capture, in the order in which they came. One that does not fit
-- stays parked and says why: the customer has paid, so the capture is booked whatever came with it.
CREATE OR REPLACE FUNCTION ledger_apply_parked(p_provider text, p_capture_id text) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    waiting ledger_parked_refund;
BEGIN
    FOR waiting IN
        SELECT * FROM ledger_parked_refund r
         WHERE r.provider = p_provider AND r.capture_id = p_capture_id AND r.applied_at IS NULL ORDER BY r.id
    LOOP
        BEGIN
            PERFORM settle_refund(waiting.provider, waiting.external_id, waiting.capture_id, waiting.currency,
                                  waiting.gross, waiting.fee, waiting.actor, waiting.effective_at);
        EXCEPTION WHEN SQLSTATE 'AX006' THEN
            UPDATE ledger_parked_refund r SET error = SQLERRM WHERE r.id = waiting.id;
        END;
    END LOOP;
END $$;
