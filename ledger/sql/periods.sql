-- Closing the books through a day, and opening a period again. Each is a row of ledger_period_close; the
-- last one counts. Both say who and why; the guard on the table (guards.sql) has the rest.
CREATE OR REPLACE FUNCTION period_close(p_through date, p_note text, p_actor text) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path = public, pg_temp AS $$
DECLARE
    period_id bigint;
BEGIN
    LOCK TABLE ledger_journal IN SHARE ROW EXCLUSIVE MODE;
    IF p_through <= ledger_closed_through() THEN
        RAISE EXCEPTION 'the books are closed through % already', ledger_closed_through() USING ERRCODE = 'AX006';
    END IF;
    INSERT INTO ledger_period_close (closed_through, closed_by, note)
        VALUES (p_through, p_actor, coalesce(p_note, '')) RETURNING id INTO period_id;
    RETURN period_id;
END $$;

-- Opens everything after p_through, which is earlier than the day through which the books are closed.
CREATE OR REPLACE FUNCTION period_reopen(p_through date, p_note text, p_actor text) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path = public, pg_temp AS $$
DECLARE
    period_id bigint;
BEGIN
    LOCK TABLE ledger_journal IN SHARE ROW EXCLUSIVE MODE;
    IF coalesce(p_note, '') = '' THEN
        RAISE EXCEPTION 'opening a period again: a reason is needed' USING ERRCODE = 'AX006';
    END IF;
    IF ledger_closed_through() IS NULL OR p_through >= ledger_closed_through() THEN
        RAISE EXCEPTION 'there is no closed day after %', p_through USING ERRCODE = 'AX006';
    END IF;
    INSERT INTO ledger_period_close (closed_through, closed_by, note)
        VALUES (p_through, p_actor, p_note) RETURNING id INTO period_id;
    RETURN period_id;
END $$;

-- Gives up a debt of a wallet's owner, or a part of it: an expense of the platform. Once per key.
CREATE OR REPLACE FUNCTION debt_write_off(
    p_account_id bigint, p_expense_id bigint, p_amount numeric, p_key text, p_reason text, p_actor text
) RETURNS TABLE (journal_id bigint, public_id uuid, replayed boolean)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = public, pg_temp AS $$
#variable_conflict use_column
DECLARE
    receivable ledger_account;
    debt numeric;
BEGIN
    IF coalesce(p_reason, '') = '' OR p_amount IS NULL OR NOT p_amount > 0 THEN
        RAISE EXCEPTION 'write-off "%": an amount above zero and a reason are needed', p_key USING ERRCODE = 'AX006';
    END IF;
    PERFORM 1 FROM ledger_balance b WHERE b.account_id = p_account_id FOR NO KEY UPDATE;
    SELECT * INTO receivable FROM ledger_account a WHERE a.code = 'customer_receivable:' || p_account_id;
    SELECT -coalesce(sum(e.amount), 0) INTO debt FROM ledger_entries e WHERE e.account_id = receivable.id;
    SELECT b.* INTO journal_id, public_id, replayed
      FROM ledger_book(
          'write_off', p_key, 'write_off', receivable.currency,
          CASE WHEN receivable.id IS NOT NULL THEN ledger_transfer(p_expense_id, receivable.id, p_amount) END,
          p_actor, jsonb_build_object('reason', p_reason), NULL, NULL, false, NULL) b;
    IF NOT replayed AND p_amount > debt THEN
        RAISE EXCEPTION 'write-off "%": % is more than the debt of %', p_key, p_amount, debt USING ERRCODE = 'AX006';
    END IF;
    RETURN NEXT;
END $$;
