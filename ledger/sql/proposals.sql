-- A proposal is decided once, and what was proposed is what is approved.
CREATE OR REPLACE FUNCTION ledger_check_proposal() RETURNS trigger
LANGUAGE plpgsql SET search_path = public, pg_temp AS $$
BEGIN
    IF TG_OP = 'INSERT' THEN
        IF NEW.state <> 'open' OR NEW.journal_id IS NOT NULL THEN
            RAISE EXCEPTION 'a proposal begins open' USING ERRCODE = 'AX006';
        END IF;
        NEW.proposed_at := clock_timestamp();
        RETURN NEW;
    END IF;
    IF OLD.state = 'open' THEN
        IF NEW.state <> 'open' THEN
            NEW.decided_at := clock_timestamp();
        END IF;
    ELSIF NOT (OLD.state = 'approved' AND OLD.journal_id IS NULL AND NEW.journal_id IS NOT NULL
               AND NEW.state = OLD.state AND NEW.decided_by = OLD.decided_by AND NEW.note = OLD.note
               AND NEW.decided_at = OLD.decided_at) THEN
        RAISE EXCEPTION 'proposal % is % and stays as it is', OLD.id, OLD.state USING ERRCODE = 'AX006';
    END IF;
    IF (NEW.public_id, NEW.kind, NEW.summary, NEW.payload, NEW.reason, NEW.proposed_by, NEW.proposed_at)
       IS DISTINCT FROM
       (OLD.public_id, OLD.kind, OLD.summary, OLD.payload, OLD.reason, OLD.proposed_by, OLD.proposed_at)
       OR (NEW.account_id, NEW.amount, NEW.amount_currency)
       IS DISTINCT FROM (OLD.account_id, OLD.amount, OLD.amount_currency) THEN
        RAISE EXCEPTION 'proposal % cannot be changed: withdraw it and make another one', OLD.id
            USING ERRCODE = 'AX006';
    END IF;
    RETURN NEW;
END $$;

CREATE OR REPLACE TRIGGER ledger_proposal_decided_once BEFORE INSERT OR UPDATE ON ledger_proposal
    FOR EACH ROW EXECUTE FUNCTION ledger_check_proposal();
ALTER TABLE ledger_proposal ENABLE ALWAYS TRIGGER ledger_proposal_decided_once;
CREATE OR REPLACE TRIGGER ledger_rows_final BEFORE DELETE ON ledger_proposal
    FOR EACH ROW EXECUTE FUNCTION ledger_refuse_change();
CREATE OR REPLACE TRIGGER ledger_table_final BEFORE TRUNCATE ON ledger_proposal
    FOR EACH STATEMENT EXECUTE FUNCTION ledger_refuse_change();
ALTER TABLE ledger_proposal ENABLE ALWAYS TRIGGER ledger_rows_final;
ALTER TABLE ledger_proposal ENABLE ALWAYS TRIGGER ledger_table_final;
