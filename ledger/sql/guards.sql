-- Guards that hold whoever writes, the owner included. All are ENABLE ALWAYS: ordinary triggers sleep
-- under session_replication_role = replica. Measurements: docs/decisions/0003-ledger-guards.md.

-- Rows that are final say so.
CREATE OR REPLACE FUNCTION ledger_refuse_change() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION '% of % is refused: its rows are final', TG_OP, TG_TABLE_NAME
        USING ERRCODE = 'restrict_violation', HINT = 'Correct the books by a new journal.';
END $$;

-- Every statement's new legs sum to zero per journal, and legs never change: so every journal sums to
-- zero, by induction. The look at xact_id keeps legs from being added to a journal of the past. Currencies are
-- compared here and not by foreign keys: those sleep under replica, and lock a row of the account that all
-- journals share (docs/decisions/0020-grants-and-the-hot-path.md).
CREATE OR REPLACE FUNCTION ledger_check_legs() RETURNS trigger
LANGUAGE plpgsql SET search_path = public, pg_temp AS $$
DECLARE
    wrong record;
BEGIN
    SELECT * INTO wrong
      FROM (SELECT g.*, (SELECT j.currency FROM ledger_journal j
                          WHERE j.id = g.journal_id AND j.xact_id = pg_current_xact_id()) AS open
              FROM (SELECT e.journal_id, e.amount_currency AS currency, sum(e.amount) AS total,
                           count(*) FILTER (WHERE e.amount_currency = (
                               SELECT a.currency FROM ledger_account a WHERE a.id = e.account_id)) = count(*) AS native
                      FROM new_entries e GROUP BY e.journal_id, e.amount_currency) g) journal
     WHERE total <> 0 OR NOT native OR open IS DISTINCT FROM currency LIMIT 1;
    IF NOT FOUND THEN
        RETURN NULL;
    END IF;
    IF wrong.total <> 0 THEN
        RAISE EXCEPTION 'legs of journal % sum to %, not to zero', wrong.journal_id, wrong.total
            USING ERRCODE = 'AX006', HINT = 'All legs of a journal go into one INSERT.';
    ELSIF NOT wrong.native THEN
        RAISE EXCEPTION 'a leg of journal % in % is on an account that has another currency or does not exist',
            wrong.journal_id, wrong.currency
            USING ERRCODE = 'foreign_key_violation', CONSTRAINT = 'entry_account_currency';
    ELSIF wrong.open IS NULL THEN
        RAISE EXCEPTION 'journal % is closed: legs come in the transaction that wrote it', wrong.journal_id
            USING ERRCODE = 'AX006';
    END IF;
    RAISE EXCEPTION 'a leg of journal % is in %, which is not its currency', wrong.journal_id, wrong.currency
        USING ERRCODE = 'foreign_key_violation', CONSTRAINT = 'entry_journal_currency';
END $$;

CREATE OR REPLACE TRIGGER ledger_legs_sum_to_zero AFTER INSERT ON ledger_entries
    REFERENCING NEW TABLE AS new_entries FOR EACH STATEMENT EXECUTE FUNCTION ledger_check_legs();
ALTER TABLE ledger_entries ENABLE ALWAYS TRIGGER ledger_legs_sum_to_zero;

-- A journal without legs moves nothing and would pass every sum. One leg cannot sum to zero, as none is zero.
CREATE OR REPLACE FUNCTION ledger_check_journal() RETURNS trigger
LANGUAGE plpgsql SET search_path = public, pg_temp SET enable_seqscan = off SET plan_cache_mode = force_generic_plan AS $$
BEGIN
    IF NOT EXISTS (SELECT 1 FROM ledger_entries e WHERE e.journal_id = NEW.id) THEN
        RAISE EXCEPTION 'journal % has fewer than two legs', NEW.id USING ERRCODE = 'AX006';
    END IF;
    RETURN NULL;
END $$;

DROP TRIGGER IF EXISTS ledger_journal_has_legs ON ledger_journal;
CREATE CONSTRAINT TRIGGER ledger_journal_has_legs AFTER INSERT ON ledger_journal
    DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION ledger_check_journal();
ALTER TABLE ledger_journal ENABLE ALWAYS TRIGGER ledger_journal_has_legs;

-- The day through which the books are closed now: a later row of ledger_period_close replaces the ones before
-- it, be it that it closes more or that it opens a period again.
CREATE OR REPLACE FUNCTION ledger_closed_through() RETURNS date
LANGUAGE sql STABLE AS $$
    SELECT p.closed_through FROM ledger_period_close p ORDER BY p.id DESC LIMIT 1
$$;

-- Whoever inserts has a lock on the table until his transaction ends, and closing takes one that excludes it:
-- no journal slips into a period being closed. With a snapshot that is older than that lock the closing row
-- could stay unseen, so journals are written READ COMMITTED only.
CREATE OR REPLACE FUNCTION ledger_check_period() RETURNS trigger
LANGUAGE plpgsql SET search_path = public, pg_temp AS $$
DECLARE
    closed date;
    wrong ledger_journal;
BEGIN
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        RAISE EXCEPTION 'journals are written in READ COMMITTED transactions only, not in % ones',
            current_setting('transaction_isolation') USING ERRCODE = 'AX006';
    END IF;
    SELECT p.closed_through INTO closed FROM ledger_period_close p ORDER BY p.id DESC LIMIT 1;
    IF NOT FOUND THEN
        RETURN NULL;
    END IF;
    SELECT * INTO wrong FROM new_journals j WHERE j.accounting_date <= closed LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION 'journal %/% is dated %, the books are closed through %',
            wrong.idem_scope, wrong.idem_key, wrong.accounting_date, closed
            USING ERRCODE = 'AX005', HINT = 'Book a correction in the open period.';
    END IF;
    RETURN NULL;
END $$;

DROP TRIGGER IF EXISTS ledger_journal_in_open_period ON ledger_journal;
CREATE TRIGGER ledger_journal_in_open_period AFTER INSERT ON ledger_journal
    REFERENCING NEW TABLE AS new_journals FOR EACH STATEMENT EXECUTE FUNCTION ledger_check_period();
ALTER TABLE ledger_journal ENABLE ALWAYS TRIGGER ledger_journal_in_open_period;

CREATE OR REPLACE FUNCTION ledger_check_close() RETURNS trigger
LANGUAGE plpgsql SET search_path = public, pg_temp AS $$
BEGIN
    LOCK TABLE ledger_journal IN SHARE ROW EXCLUSIVE MODE;
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

-- An account keeps its currency, and stays: legs have no foreign key to it.
CREATE OR REPLACE TRIGGER ledger_account_final BEFORE UPDATE OF id, code, currency, hot OR DELETE ON ledger_account
    FOR EACH ROW EXECUTE FUNCTION ledger_refuse_change();
CREATE OR REPLACE TRIGGER ledger_table_final BEFORE TRUNCATE ON ledger_account
    FOR EACH STATEMENT EXECUTE FUNCTION ledger_refuse_change();
ALTER TABLE ledger_account ENABLE ALWAYS TRIGGER ledger_account_final;
ALTER TABLE ledger_account ENABLE ALWAYS TRIGGER ledger_table_final;

-- Append-only tables.

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
