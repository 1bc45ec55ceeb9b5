-- Money of a capture that went back, booked once per (provider, external_id) whatever channel told us of it.
--
-- Kinds: `refund` (we sent it) and `reversal` (the provider took it: chargeback, claim). Both have the same
-- legs. For gross R of which the provider gives back the fee f: debit the wallet R, credit clearing R - f and
-- processor fees f. What the wallet has not got any more is its owner's debt, on customer_receivable.
-- One that is told before its capture is parked; booking the capture books it too. All that went back of one
-- capture, less what came back to us (recoveries.sql), never exceeds it.
DROP FUNCTION IF EXISTS settle_refund(text, text, text, text, numeric, numeric, text, timestamptz);
CREATE OR REPLACE FUNCTION settle_refund(
    p_provider text, p_external_id text, p_capture_id text, p_currency text, p_gross numeric, p_fee numeric,
    p_actor text, p_effective_at timestamptz, p_kind text DEFAULT 'refund',
    OUT settlement_id bigint, OUT journal_id bigint, OUT replayed boolean, OUT parked boolean
)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = public, pg_temp AS $$
#variable_conflict use_column
DECLARE
    label text := format('%s %s of capture %s', p_kind, p_external_id, p_capture_id);
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
    IF p_kind IS NULL OR p_kind NOT IN ('refund', 'reversal') THEN
        RAISE EXCEPTION '%: unknown kind "%"', label, p_kind USING ERRCODE = 'AX006';
    END IF;
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
        parked := true;
        SELECT * INTO waiting FROM ledger_parked_refund r
         WHERE r.provider = p_provider AND r.external_id = p_external_id AND r.kind IN ('refund', 'reversal');
        IF NOT FOUND THEN
            PERFORM ledger_park(p_provider, p_kind, p_external_id, p_capture_id, p_currency, p_gross, p_fee, p_actor,
                                p_effective_at);
            RETURN;
        END IF;
        replayed := true;
        PERFORM ledger_same_refund(label, waiting.capture_id, waiting.currency, waiting.gross, waiting.fee,
                                   p_capture_id, p_currency, p_gross, p_fee);
        RETURN;
    END IF;
    PERFORM 1 FROM ledger_balance b WHERE b.account_id = capture.account_id FOR NO KEY UPDATE;
    SELECT * INTO first FROM settlement s
     WHERE s.provider = p_provider AND s.kind IN ('refund', 'reversal') AND s.external_id = p_external_id;
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
    SELECT r.gross, r.fee INTO refunded, fees_back FROM ledger_gone_back(p_provider, p_capture_id) r;
    IF refunded + p_gross > capture.gross OR fees_back + p_fee > capture.fee THEN
        RAISE EXCEPTION '%: % with a fee of % is more than the % and % that are left of it',
            label, p_gross, p_fee, capture.gross - refunded, capture.fee - fees_back
            USING ERRCODE = 'AX006';
    END IF;

    SELECT w.clearing, w.fees INTO clearing, fees FROM ledger_way_of(capture.journal_id) w;
    -- Promotional credit is no money: it is not sent back.
    SELECT greatest(0, least(b.posted - b.held, b.posted - b.granted) - b.floor) INTO available
      FROM ledger_balance b WHERE b.account_id = capture.account_id;
    debt := greatest(0, p_gross - available);  -- NULL floor: no limit, no debt
    IF (p_effective_at AT TIME ZONE 'UTC')::date <= ledger_closed_through() THEN
        effective_at := NULL;
    END IF;
    SELECT b.journal_id INTO journal_id
      FROM ledger_book(
          p_provider || '.' || p_kind, p_external_id, p_kind, p_currency,
          (SELECT jsonb_agg(jsonb_build_object('account', account, 'amount', amount))
             FROM (VALUES (capture.account_id, debt - p_gross), (clearing, p_gross - p_fee), (fees, p_fee),
                          (CASE WHEN debt > 0 THEN ledger_receivable_of(capture.account_id) END, -debt)
                  ) l (account, amount)
            WHERE amount <> 0),
          p_actor, jsonb_build_object('capture', p_capture_id, 'refunded_at', p_effective_at),
          effective_at, NULL, false, NULL, p_paid_only => true) b;
    INSERT INTO settlement (provider, kind, external_id, parent_external_id, order_id, account_id, top_up_id,
                            gross, currency, fee, net, journal_id, occurred_at)
        VALUES (p_provider, p_kind, p_external_id, p_capture_id, capture.order_id, capture.account_id,
                capture.top_up_id, p_gross, p_currency, p_fee, p_gross - p_fee, settle_refund.journal_id,
                p_effective_at)
        RETURNING id INTO settlement_id;
    UPDATE ledger_parked_refund r SET applied_at = clock_timestamp(), error = ''
     WHERE r.provider = p_provider AND r.external_id = p_external_id AND r.kind IN ('refund', 'reversal');
    PERFORM ledger_apply_parked(p_provider, p_capture_id, false);
END $$;

-- What went back of a capture so far: refunds and reversals, less what came back to us.
CREATE OR REPLACE FUNCTION ledger_gone_back(p_provider text, p_capture_id text, OUT gross numeric, OUT fee numeric)
LANGUAGE sql STABLE AS $$
    SELECT coalesce(sum(CASE WHEN s.kind IN ('refund', 'reversal') THEN s.gross ELSE -s.gross END), 0),
           coalesce(sum(CASE WHEN s.kind IN ('refund', 'reversal') THEN s.fee ELSE -s.fee END), 0)
      FROM settlement s
     WHERE s.provider = p_provider AND s.parent_external_id = p_capture_id
       AND s.kind IN ('refund', 'reversal', 'reversal_cancelled', 'refund_failed')
$$;

-- The platform's accounts that a capture touched. The way back is the way the money came.
CREATE OR REPLACE FUNCTION ledger_way_of(p_journal_id bigint, OUT clearing bigint, OUT fees bigint)
LANGUAGE sql STABLE AS $$
    SELECT min(a.id) FILTER (WHERE a.type = 'asset'), min(a.id) FILTER (WHERE a.type = 'expense')
      FROM ledger_entries e JOIN ledger_account a ON a.id = e.account_id WHERE e.journal_id = p_journal_id
$$;

CREATE OR REPLACE FUNCTION ledger_park(
    p_provider text, p_kind text, p_external_id text, p_capture_id text, p_currency text, p_gross numeric,
    p_fee numeric, p_actor text, p_effective_at timestamptz
) RETURNS void
LANGUAGE sql AS $$
    INSERT INTO ledger_parked_refund (provider, kind, external_id, capture_id, currency, gross, fee, actor,
                                      effective_at, error)
        VALUES (p_provider, p_kind, p_external_id, p_capture_id, p_currency, p_gross, p_fee, p_actor,
                p_effective_at, '')
$$;

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

-- Books what came before that which it is about, in the order in which it came: with a capture its refunds and
-- reversals (p_taken), and after each of those what of it came back to us. One that does not fit stays parked and
-- says why: the customer has paid, so the capture is booked whatever came with it.
DROP FUNCTION IF EXISTS ledger_apply_parked(text, text);
CREATE OR REPLACE FUNCTION ledger_apply_parked(p_provider text, p_capture_id text, p_taken boolean DEFAULT true)
RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    waiting ledger_parked_refund;
BEGIN
    FOR waiting IN
        SELECT * FROM ledger_parked_refund r
         WHERE r.provider = p_provider AND r.capture_id = p_capture_id AND r.applied_at IS NULL
           AND (r.kind IN ('refund', 'reversal')) = p_taken ORDER BY r.id
    LOOP
        BEGIN
            IF p_taken THEN
                PERFORM settle_refund(waiting.provider, waiting.external_id, waiting.capture_id, waiting.currency,
                                      waiting.gross, waiting.fee, waiting.actor, waiting.effective_at, waiting.kind);
            ELSE
                PERFORM settle_recovery(waiting.provider, waiting.kind, waiting.external_id, waiting.capture_id,
                                        waiting.currency, waiting.gross, waiting.fee, waiting.actor,
                                        waiting.effective_at);
            END IF;
        EXCEPTION WHEN SQLSTATE 'AX006' THEN
            UPDATE ledger_parked_refund r SET error = SQLERRM WHERE r.id = waiting.id;
        END;
    END LOOP;
END $$;
