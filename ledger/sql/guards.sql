-- Guards that hold whoever writes, the owner included. All are ENABLE ALWAYS: ordinary triggers sleep
-- under session_replication_role = replica. Measurements: docs/decisions/0003-ledger-guards.md.

-- Every statement's new legs sum to zero per journal, and legs never change: so every journal sums to
-- zero, by induction. The look at xact_id keeps legs from being added to a journal of the past.
CREATE OR REPLACE FUNCTION ledger_check_legs() RETURNS trigger
LANGUAGE plpgsql SET search_path = public, pg_temp AS $$
DECLARE
    journal record;
BEGIN
    FOR journal IN
        SELECT e.journal_id, sum(e.amount) AS total FROM new_entries e GROUP BY e.journal_id, e.amount_currency
    LOOP
        IF journal.total <> 0 THEN
            RAISE EXCEPTION 'legs of journal % sum to %, not to zero', journal.journal_id, journal.total
                USING ERRCODE = 'AX006', HINT = 'All legs of a journal go into one INSERT.';
        END IF;
        IF NOT EXISTS (
            SELECT 1 FROM ledger_journal j
             WHERE j.id = journal.journal_id AND j.xact_id = pg_current_xact_id()
        ) THEN
            RAISE EXCEPTION 'journal % is closed: legs come in the transaction that wrote it', journal.journal_id
                USING ERRCODE = 'AX006';
        END IF;
    END LOOP;
    RETURN NULL;
END $$;

CREATE OR REPLACE TRIGGER ledger_legs_sum_to_zero AFTER INSERT ON ledger_entries
    REFERENCING NEW TABLE AS new_entries FOR EACH STATEMENT EXECUTE FUNCTION ledger_check_legs();
ALTER TABLE ledger_entries ENABLE ALWAYS TRIGGER ledger_legs_sum_to_zero;

-- A journal without legs moves nothing and would pass every sum.
CREATE OR REPLACE FUNCTION ledger_check_journal() RETURNS trigger
LANGUAGE plpgsql SET search_path = public, pg_temp AS $$
BEGIN
    IF (SELECT count(*) FROM (SELECT 1 FROM ledger_entries e WHERE e.journal_id = NEW.id LIMIT 2) legs) < 2 THEN
        RAISE EXCEPTION 'journal % has fewer than two legs', NEW.id USING ERRCODE = 'AX006';
    END IF;
    RETURN NULL;
END $$;

DROP TRIGGER IF EXISTS ledger_journal_has_legs ON ledger_journal;
CREATE CONSTRAINT TRIGGER ledger_journal_has_legs AFTER INSERT ON ledger_journal
    DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION ledger_check_journal();
ALTER TABLE ledger_journal ENABLE ALWAYS TRIGGER ledger_journal_has_legs;

-- Posting takes the lock shared, closing takes it alone: no journal slips into a period being closed.
CREATE OR REPLACE FUNCTION ledger_check_period() RETURNS trigger
LANGUAGE plpgsql SET search_path = public, pg_temp AS $$
DECLARE
    closed date;
BEGIN
    PERFORM pg_advisory_xact_lock_shared(hashtext('ledger_period_close'));
    SELECT max(p.closed_through) INTO closed FROM ledger_period_close p;
    IF NEW.accounting_date <= closed THEN
        RAISE EXCEPTION 'journal %/% is dated %, the books are closed through %',
            NEW.idem_scope, NEW.idem_key, NEW.accounting_date, closed
            USING ERRCODE = 'AX005', HINT = 'Book a correction in the open period.';
    END IF;
    RETURN NULL;
END $$;

CREATE OR REPLACE TRIGGER ledger_journal_in_open_period AFTER INSERT ON ledger_journal
    FOR EACH ROW EXECUTE FUNCTION ledger_check_period();
ALTER TABLE ledger_journal ENABLE ALWAYS TRIGGER ledger_journal_in_open_period;

CREATE OR REPLACE FUNCTION ledger_check_close() RETURNS trigger
LANGUAGE plpgsql SET search_path = public, pg_temp AS $$
BEGIN
    PERFORM pg_advisory_xact_lock(hashtext('ledger_period_close'));
    IF NEW.closed_through >= (clock_timestamp() AT TIME ZONE 'UTC')::date THEN
        RAISE EXCEPTION 'a period can be closed when it is over, % is not', NEW.closed_through
            USING ERRCODE = 'AX006';
    END IF;
    -- Every posting that was under way has ended: what is dated inside and began later is wrong.
    NEW.created_at := clock_timestamp();
    RETURN NEW;
END $$;

CREATE OR REPLACE TRIGGER ledger_close_is_over BEFORE INSERT ON ledger_period_close
    FOR EACH ROW EXECUTE FUNCTION ledger_check_close();
ALTER TABLE ledger_period_close ENABLE ALWAYS TRIGGER ledger_close_is_over;

-- Append-only tables.
CREATE OR REPLACE FUNCTION ledger_refuse_change() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION '% of % is refused: its rows are final', TG_OP, TG_TABLE_NAME
        USING ERRCODE = 'restrict_violation', HINT = 'Correct the books by a new journal.';
END $$;

DO $$
DECLARE
    name text;
BEGIN
    FOREACH name IN ARRAY ARRAY[
        'ledger_journal', 'ledger_entries', 'settlement', 'audit_events', 'ledger_period_close'
    ] LOOP
        EXECUTE format(
            'CREATE OR REPLACE TRIGGER ledger_rows_final BEFORE UPDATE OR DELETE ON %I
                 FOR EACH ROW EXECUTE FUNCTION ledger_refuse_change()', name);
        EXECUTE format(
            'CREATE OR REPLACE TRIGGER ledger_table_final BEFORE TRUNCATE ON %I
                 FOR EACH STATEMENT EXECUTE FUNCTION ledger_refuse_change()', name);
        EXECUTE format('ALTER TABLE %I ENABLE ALWAYS TRIGGER ledger_rows_final', name);
        EXECUTE format('ALTER TABLE %I ENABLE ALWAYS TRIGGER ledger_table_final', name);
    END LOOP;
END $$;
