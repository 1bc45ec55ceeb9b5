-- What a correction gives back, it gives back to where it came from: what was drawn last comes back first. A wallet
-- stands afterwards as if its lines had been charged right at once: credit without terms, which is drawn on last,
-- returns before that of grants, and grants in the reverse order of their draws.

CREATE OR REPLACE TRIGGER ledger_rows_final BEFORE UPDATE OR DELETE ON usage_return
    FOR EACH ROW EXECUTE FUNCTION ledger_refuse_change();
CREATE OR REPLACE TRIGGER ledger_table_final BEFORE TRUNCATE ON usage_return
    FOR EACH STATEMENT EXECUTE FUNCTION ledger_refuse_change();
ALTER TABLE usage_return ENABLE ALWAYS TRIGGER ledger_rows_final;
ALTER TABLE usage_return ENABLE ALWAYS TRIGGER ledger_table_final;

-- For the corrections of a wallet that a journal has booked: says of which lines each takes something back, the
-- latest first, and restores the grants that those drew on. Under the wallet's lock, and not for the application.
CREATE OR REPLACE FUNCTION usage_give_back(p_account_id bigint, p_journal_id bigint) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    correction usage_line;
    source record;
    missing numeric;
    part numeric;
    restored numeric := 0;
BEGIN
    FOR correction IN SELECT * FROM usage_line l WHERE l.journal_id = p_journal_id ORDER BY l.id LOOP
        missing := -correction.charge;
        FOR source IN
            SELECT o.line_id, o.journal_id,
                   o.charge - (SELECT coalesce(sum(r.amount), 0) FROM usage_return r WHERE r.line_id = o.line_id) AS stands
              FROM usage_corrected(correction.id) o WHERE o.charge > 0 ORDER BY o.step
        LOOP
            part := least(missing, source.stands);
            CONTINUE WHEN part <= 0;
            restored := restored + grant_return(p_account_id, p_journal_id, source.journal_id, part);
            INSERT INTO usage_return (line_id, correction_id, amount) VALUES (source.line_id, correction.id, part);
            missing := missing - part;
        END LOOP;
    END LOOP;
    UPDATE ledger_balance b SET granted = b.granted + restored WHERE b.account_id = p_account_id AND restored > 0;
END $$;

-- Restores what a wallet's grants get when another amount of a journal comes back; gives the sum, the rest is credit
-- without terms. The draws of the journal, the last first, lie behind what it took beyond them and what came back
-- of it before.
CREATE OR REPLACE FUNCTION grant_return(p_account_id bigint, p_journal_id bigint, p_source_id bigint, p_amount numeric)
RETURNS numeric
LANGUAGE plpgsql AS $$
DECLARE
    charged numeric;
    returned numeric;
    total numeric;
BEGIN
    SELECT sum(l.charge) INTO charged FROM usage_line l
     WHERE l.journal_id = p_source_id AND l.account_id = p_account_id AND l.charge > 0;
    SELECT coalesce(sum(r.amount), 0) INTO returned FROM usage_return r JOIN usage_line l ON l.id = r.line_id
     WHERE l.journal_id = p_source_id AND l.account_id = p_account_id;
    WITH draws AS (
        SELECT u.id, u.grant_id, u.amount, sum(u.amount) OVER (ORDER BY u.id) AS drawn
          FROM grant_use u JOIN credit_grant g ON g.id = u.grant_id
         WHERE u.journal_id = p_source_id AND g.account_id = p_account_id AND u.amount > 0
    ), parts AS (
        SELECT id, grant_id, least(charged - drawn + amount, returned + p_amount) - greatest(charged - drawn, returned) AS amount
          FROM draws
    ), restored AS (
        UPDATE credit_grant g SET remaining = g.remaining + p.amount
          FROM (SELECT grant_id, sum(amount) AS amount FROM parts WHERE amount > 0 GROUP BY grant_id) p
         WHERE g.id = p.grant_id
    ), recorded AS (
        INSERT INTO grant_use (grant_id, journal_id, amount)
            SELECT grant_id, p_journal_id, -amount FROM parts WHERE amount > 0 ORDER BY id DESC
        RETURNING amount
    )
    SELECT -coalesce(sum(amount), 0) INTO total FROM recorded;
    RETURN total;
END $$;
