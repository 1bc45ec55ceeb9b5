-- Money from outside, booked once per (provider, kind, external_id) whatever channel told us of it.
--
-- A capture of gross G with fee F: debit clearing G - F and processor fees F, credit the wallet G. The
-- top-up is marked settled in the same transaction. What the wallet's owner owes is taken from it then.
CREATE OR REPLACE FUNCTION settle_apply(
    p_provider text, p_kind text, p_external_id text, p_order_id text, p_top_up_id bigint,
    p_account_id bigint, p_clearing_id bigint, p_fees_id bigint, p_currency text, p_gross numeric,
    p_fee numeric, p_actor text, p_effective_at timestamptz
) RETURNS TABLE (settlement_id bigint, journal_id bigint, replayed boolean)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = public, pg_temp AS $$
#variable_conflict use_column
DECLARE
    net numeric := p_gross - p_fee;
    effective_at timestamptz := p_effective_at;
BEGIN
    IF p_kind IS DISTINCT FROM 'capture' THEN
        RAISE EXCEPTION 'settlement %: unknown kind "%"', p_external_id, p_kind USING ERRCODE = 'AX006';
    END IF;
    IF p_gross IS NULL OR p_fee IS NULL OR NOT (p_fee >= 0 AND p_fee < p_gross) THEN
        RAISE EXCEPTION 'settlement %: gross must be above the fee, and that not below zero', p_external_id
            USING ERRCODE = 'AX006';
    END IF;
    PERFORM ledger_lock_capture(p_provider, p_external_id);
    -- Money that came late for its period belongs to the open one; its own time stays in meta. A replay
    -- is asked without a time, because the period may have been closed since.
    IF (p_effective_at AT TIME ZONE 'UTC')::date <= ledger_closed_through()
        OR EXISTS (SELECT 1 FROM settlement s
                    WHERE s.provider = p_provider AND s.kind = p_kind AND s.external_id = p_external_id)
    THEN
        effective_at := NULL;
    END IF;
    SELECT b.journal_id, b.replayed INTO journal_id, replayed
      FROM ledger_book(
          p_provider || '.' || p_kind, p_external_id, 'top_up', p_currency,
          (SELECT jsonb_agg(jsonb_build_object('account', account, 'amount', amount))
             FROM (VALUES (p_clearing_id, -net), (p_fees_id, -p_fee), (p_account_id, p_gross)) l (account, amount)
            WHERE amount <> 0),
          p_actor, jsonb_build_object('order', p_order_id, 'captured_at', p_effective_at),
          effective_at, NULL, false, NULL) b;
    IF replayed THEN
        SELECT s.id INTO STRICT settlement_id FROM settlement s WHERE s.journal_id = settle_apply.journal_id;
    ELSE
        INSERT INTO settlement (provider, kind, external_id, parent_external_id, order_id, account_id, top_up_id,
                                gross, currency, fee, net, journal_id, occurred_at)
            VALUES (p_provider, p_kind, p_external_id, '', coalesce(p_order_id, ''), p_account_id, p_top_up_id,
                    p_gross, p_currency, p_fee, net, settle_apply.journal_id, p_effective_at)
            RETURNING id INTO settlement_id;
        UPDATE ledger_top_up t SET state = 'settled', failure = '', changed_at = clock_timestamp()
         WHERE t.id = p_top_up_id;
        PERFORM ledger_apply_parked(p_provider, p_external_id);
        PERFORM ledger_collect_debt(p_account_id, settlement_id, p_actor);
    END IF;
    RETURN NEXT;
END $$;

-- Pays the debt of a wallet (customer_receivable) out of new credit, as far as that goes.
CREATE OR REPLACE FUNCTION ledger_collect_debt(p_account_id bigint, p_settlement_id bigint, p_actor text)
RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    receivable ledger_account;
    payment numeric;
BEGIN
    SELECT * INTO receivable FROM ledger_account a WHERE a.code = 'customer_receivable:' || p_account_id;
    IF NOT FOUND THEN
        RETURN;
    END IF;
    SELECT least(-(SELECT coalesce(sum(e.amount), 0) FROM ledger_entries e WHERE e.account_id = receivable.id),
                 least(b.posted - b.held, b.posted - b.granted) - b.floor)
      INTO payment FROM ledger_balance b WHERE b.account_id = p_account_id;
    IF payment > 0 THEN
        PERFORM ledger_book(
            'debt_repayment', p_settlement_id::text, 'debt_repayment', receivable.currency,
            jsonb_build_array(jsonb_build_object('account', p_account_id, 'amount', -payment),
                              jsonb_build_object('account', receivable.id, 'amount', payment)),
            p_actor, NULL, NULL, NULL, false, NULL, p_paid_only => true);
    END IF;
END $$;
