-- Sums of entries up to a horizon: no entry at or below it is still to come. Ids are drawn before they are
-- committed, so the horizon is taken in a moment in which nobody is writing.
CREATE OR REPLACE FUNCTION totals_horizon() RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path = public, pg_temp AS $$
BEGIN
    LOCK TABLE ledger_entries IN SHARE MODE;
    RETURN (SELECT coalesce(max(e.id), 0) FROM ledger_entries e);
END $$;

-- Brings the totals of the accounts without a balance row up to the horizon; gives how many changed. The
-- horizon is one of a transaction that has ended.
CREATE OR REPLACE FUNCTION totals_advance(p_horizon bigint) RETURNS int
LANGUAGE plpgsql SECURITY DEFINER SET search_path = public, pg_temp AS $$
DECLARE
    changed int;
BEGIN
    -- One at a time, or the same entries would be added twice.
    PERFORM pg_advisory_xact_lock(hashtext('totals_advance'));
    INSERT INTO ledger_account_total AS t (account_id, up_to_entry, posted, taken_at)
        SELECT a.id, p_horizon, coalesce(o.posted, 0) + newer.amount, clock_timestamp()
          FROM ledger_account a
          LEFT JOIN ledger_account_total o ON o.account_id = a.id
          CROSS JOIN LATERAL (SELECT sum(e.amount) AS amount FROM ledger_entries e
                               WHERE e.account_id = a.id AND e.id > coalesce(o.up_to_entry, 0)
                                 AND e.id <= p_horizon) newer
         WHERE a.hot AND newer.amount IS NOT NULL
        ON CONFLICT (account_id) DO UPDATE
            SET up_to_entry = excluded.up_to_entry, posted = excluded.posted, taken_at = excluded.taken_at;
    GET DIAGNOSTICS changed = ROW_COUNT;
    RETURN changed;
END $$;
