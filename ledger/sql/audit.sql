-- The sealed chain over audit_events. Why so: docs/decisions/0010-sealed-audit-chain.md.

-- When and in which transaction an event was written is the database's to say: sealing goes by it. Not
-- ENABLE ALWAYS, because a replica has to keep what was written, or its chain would not verify.
CREATE OR REPLACE FUNCTION audit_stamp() RETURNS trigger
LANGUAGE plpgsql SET search_path = public, pg_temp AS $$
BEGIN
    NEW.xact_id := pg_current_xact_id();
    NEW.created_at := now();
    RETURN NEW;
END $$;

CREATE OR REPLACE TRIGGER audit_event_stamped BEFORE INSERT ON audit_events
    FOR EACH ROW EXECUTE FUNCTION audit_stamp();

-- One field of the canonical bytes: its length in bytes, a colon, the text, a comma; NULL is "-,".
CREATE OR REPLACE FUNCTION audit_field(p_text text) RETURNS text LANGUAGE sql IMMUTABLE AS $$
    SELECT coalesce(octet_length(convert_to(p_text, 'UTF8')) || ':' || p_text, '-') || ','
$$;

-- The hash of a link, version 1. Frozen: seals were made with it, and ledger/audit/chain.py makes the same
-- bytes without it. Another form is another function with another version. Times in microseconds, as stored.
CREATE OR REPLACE FUNCTION audit_hash_v1(p_prev_hash bytea, p_seq bigint, p_event audit_events) RETURNS bytea
LANGUAGE sql STABLE AS $$
    SELECT sha256(p_prev_hash || convert_to(
        audit_field('apex.audit.1') || audit_field(p_event.shard::text) || audit_field(p_seq::text)
        || audit_field(p_event.id::text) || audit_field(p_event.xact_id::text)
        || audit_field((extract(epoch FROM p_event.created_at) * 1000000)::bigint::text)
        || audit_field(p_event.actor) || audit_field(p_event.action) || audit_field(p_event.object_type)
        || audit_field(p_event.object_id) || audit_field(p_event.request_id)
        || audit_field(p_event.before::text) || audit_field(p_event.after::text), 'UTF8'))
$$;

-- Seals at most p_limit events of a shard; returns how many. In the order (xact_id, id), and only events
-- whose transaction is older than every open one: nothing can come in before what is sealed. The ids alone
-- would not do, as they are drawn before the transaction gets its own.
CREATE OR REPLACE FUNCTION audit_seal_events(p_shard int, p_limit int) RETURNS int
LANGUAGE plpgsql SECURITY DEFINER SET search_path = public, pg_temp AS $$
DECLARE
    head audit_seal;
    event audit_events;
    link_hash bytea;
    sealed int := 0;
BEGIN
    -- Who comes second leaves it to the first. Without the lock the unique (shard, prev_hash) would refuse.
    IF NOT pg_try_advisory_xact_lock(hashtext('audit_seal'), p_shard) THEN
        RETURN 0;
    END IF;
    SELECT * INTO head FROM audit_seal s WHERE s.shard = p_shard ORDER BY s.seq DESC LIMIT 1;
    IF NOT FOUND THEN
        head.seq := 0;
        head.event_id := 0;
        head.xact_id := '0';
        head.hash := decode(repeat('00', 32), 'hex');
    END IF;
    FOR event IN
        SELECT * FROM audit_events e
         WHERE e.shard = p_shard AND (e.xact_id, e.id) > (head.xact_id, head.event_id)
           AND e.xact_id < pg_snapshot_xmin(pg_current_snapshot())
         ORDER BY e.xact_id, e.id LIMIT p_limit
    LOOP
        sealed := sealed + 1;
        link_hash := audit_hash_v1(head.hash, head.seq + sealed, event);
        INSERT INTO audit_seal (shard, seq, event_id, xact_id, version, prev_hash, hash, sealed_at)
            VALUES (p_shard, head.seq + sealed, event.id, event.xact_id, 1, head.hash, link_hash, clock_timestamp());
        head.hash := link_hash;
    END LOOP;
    RETURN sealed;
END $$;

-- Seals are as final as what they seal.
CREATE OR REPLACE TRIGGER ledger_rows_final BEFORE UPDATE OR DELETE ON audit_seal
    FOR EACH ROW EXECUTE FUNCTION ledger_refuse_change();
CREATE OR REPLACE TRIGGER ledger_table_final BEFORE TRUNCATE ON audit_seal
    FOR EACH STATEMENT EXECUTE FUNCTION ledger_refuse_change();
ALTER TABLE audit_seal ENABLE ALWAYS TRIGGER ledger_rows_final;
ALTER TABLE audit_seal ENABLE ALWAYS TRIGGER ledger_table_final;
