-- Credit grants: credit of a wallet that has terms of its own. What a wallet has beyond its grants is paid
-- credit without terms: posted = granted + paid, and ledger_balance.granted = sum of remaining.
--
-- Spending draws on grants first: promotional ones before the others, then the earliest expiry, the lower
-- priority number, the oldest; paid credit without terms comes last. Every draw is a row of grant_use, so
-- that a reversal gives back to the very grants. All of it happens under the lock on the wallet's balance.

-- Terms are final; a grant only loses and regains what remains of it.
CREATE OR REPLACE TRIGGER ledger_terms_final BEFORE UPDATE ON credit_grant FOR EACH ROW
    WHEN ((OLD.id, OLD.account_id, OLD.kind, OLD.amount, OLD.amount_currency, OLD.priority, OLD.expires_at,
           OLD.journal_id, OLD.note, OLD.created_at)
          IS DISTINCT FROM
          (NEW.id, NEW.account_id, NEW.kind, NEW.amount, NEW.amount_currency, NEW.priority, NEW.expires_at,
           NEW.journal_id, NEW.note, NEW.created_at))
    EXECUTE FUNCTION ledger_refuse_change();
CREATE OR REPLACE TRIGGER ledger_rows_final BEFORE DELETE ON credit_grant
    FOR EACH ROW EXECUTE FUNCTION ledger_refuse_change();
CREATE OR REPLACE TRIGGER ledger_table_final BEFORE TRUNCATE ON credit_grant
    FOR EACH STATEMENT EXECUTE FUNCTION ledger_refuse_change();
CREATE OR REPLACE TRIGGER ledger_rows_final BEFORE UPDATE OR DELETE ON grant_use
    FOR EACH ROW EXECUTE FUNCTION ledger_refuse_change();
CREATE OR REPLACE TRIGGER ledger_table_final BEFORE TRUNCATE ON grant_use
    FOR EACH STATEMENT EXECUTE FUNCTION ledger_refuse_change();
ALTER TABLE credit_grant ENABLE ALWAYS TRIGGER ledger_terms_final;
ALTER TABLE credit_grant ENABLE ALWAYS TRIGGER ledger_rows_final;
ALTER TABLE credit_grant ENABLE ALWAYS TRIGGER ledger_table_final;
ALTER TABLE grant_use ENABLE ALWAYS TRIGGER ledger_rows_final;
ALTER TABLE grant_use ENABLE ALWAYS TRIGGER ledger_table_final;

-- What remains of grants whose time is over: nobody may spend it, though the sweep has not taken it yet.
CREATE OR REPLACE FUNCTION grant_expired(p_account_id bigint, p_at timestamptz) RETURNS numeric
LANGUAGE sql STABLE AS $$
    SELECT coalesce(sum(g.remaining), 0) FROM credit_grant g
     WHERE g.account_id = p_account_id AND g.remaining > 0 AND g.expires_at <= p_at
$$;

-- Makes the grant that a journal's credit is. Not for the application, as the following ones.
CREATE OR REPLACE FUNCTION grant_make(
    p_account_id bigint, p_journal_id bigint, p_amount numeric, p_currency text, p_terms jsonb
) RETURNS numeric
LANGUAGE plpgsql AS $$
DECLARE
    expires_at timestamptz := p_terms ->> 'expires_at';
BEGIN
    IF expires_at <= clock_timestamp() THEN
        RAISE EXCEPTION 'a grant cannot expire in the past, on %', expires_at USING ERRCODE = 'AX006';
    END IF;
    INSERT INTO credit_grant (account_id, kind, amount, amount_currency, remaining, recognised, priority, expires_at,
                              journal_id, note, created_at)
        VALUES (p_account_id, p_terms ->> 'kind', p_amount, p_currency, p_amount, 0, (p_terms ->> 'priority')::int,
                expires_at, p_journal_id, p_terms ->> 'note', clock_timestamp());
    RETURN p_amount;
END $$;

-- Draws an amount on the grants of a wallet as they stood at p_at, as far as they go; or on one grant, wholly.
-- Gives the sum; the rest comes out of paid credit.
CREATE OR REPLACE FUNCTION grant_draw(
    p_account_id bigint, p_journal_id bigint, p_amount numeric, p_at timestamptz, p_grant_id bigint
) RETURNS numeric
LANGUAGE plpgsql AS $$
DECLARE
    total numeric;
BEGIN
    WITH open AS (
        SELECT g.id, g.remaining, row_number() OVER draw_order AS place,
               sum(g.remaining) OVER draw_order - g.remaining AS before
          FROM credit_grant g
         WHERE g.account_id = p_account_id AND g.remaining > 0
           AND CASE WHEN p_grant_id IS NULL THEN g.expires_at IS NULL OR g.expires_at > p_at
                    ELSE g.id = p_grant_id END
        WINDOW draw_order AS (ORDER BY g.kind <> 'promotional', g.expires_at NULLS LAST, g.priority, g.id)
    ), drawn AS (
        SELECT id, place, least(remaining, p_amount - before) AS amount FROM open WHERE before < p_amount
    ), lessened AS (
        UPDATE credit_grant g SET remaining = g.remaining - d.amount FROM drawn d WHERE g.id = d.id
    ), recorded AS (
        INSERT INTO grant_use (grant_id, journal_id, amount) SELECT id, p_journal_id, amount FROM drawn ORDER BY place
        RETURNING amount
    )
    SELECT coalesce(sum(amount), 0) INTO total FROM recorded;
    IF p_grant_id IS NOT NULL AND total <> p_amount THEN
        RAISE EXCEPTION 'grant % of account % has % left, % is required', p_grant_id, p_account_id, total, p_amount
            USING ERRCODE = 'AX006';
    END IF;
    RETURN total;
END $$;

-- Gives back to the grants what a journal drew on them, in the reverse order; returns the sum.
CREATE OR REPLACE FUNCTION grant_unwind(p_account_id bigint, p_reversal_id bigint, p_journal_id bigint) RETURNS numeric
LANGUAGE sql AS $$
    WITH uses AS (
        SELECT u.id, u.grant_id, u.amount FROM grant_use u JOIN credit_grant g ON g.id = u.grant_id
         WHERE u.journal_id = p_journal_id AND g.account_id = p_account_id
    ), restored AS (
        UPDATE credit_grant g SET remaining = g.remaining + u.amount
          FROM (SELECT grant_id, sum(amount) AS amount FROM uses GROUP BY grant_id) u WHERE g.id = u.grant_id
    ), recorded AS (
        INSERT INTO grant_use (grant_id, journal_id, amount)
            SELECT grant_id, p_reversal_id, -amount FROM uses ORDER BY id DESC
        RETURNING amount
    )
    SELECT -coalesce(sum(amount), 0) FROM recorded
$$;

-- Grants credit, once per key. The funding account pays for it: promo_deferred for promises, an expense or
-- revenue for amends, clearing or bank for what was paid.
CREATE OR REPLACE FUNCTION credit_grant_create(
    p_account_id bigint, p_funding_id bigint, p_kind text, p_amount numeric, p_currency text, p_priority int,
    p_expires_at timestamptz, p_key text, p_note text, p_actor text
) RETURNS TABLE (grant_id bigint, journal_id bigint, replayed boolean)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = public, pg_temp AS $$
#variable_conflict use_column
DECLARE
    terms jsonb := jsonb_build_object('kind', p_kind, 'priority', p_priority, 'expires_at', p_expires_at,
                                      'note', coalesce(p_note, ''));
BEGIN
    IF p_kind IS NULL OR p_kind NOT IN ('paid', 'promotional', 'refund', 'sla') THEN
        RAISE EXCEPTION 'grant "%": its kind must be paid, promotional, refund or sla', p_key USING ERRCODE = 'AX006';
    END IF;
    IF p_amount IS NULL OR NOT p_amount > 0 THEN
        RAISE EXCEPTION 'grant "%": amount must be above zero', p_key USING ERRCODE = 'AX006';
    END IF;
    IF p_priority IS NULL OR p_priority NOT BETWEEN 1 AND 100 THEN
        RAISE EXCEPTION 'grant "%": priority must be 1 (first) to 100', p_key USING ERRCODE = 'AX006';
    END IF;
    IF NOT EXISTS (SELECT 1 FROM ledger_balance b WHERE b.account_id = p_account_id)
        OR NOT EXISTS (SELECT 1 FROM ledger_account a
                        WHERE a.id = p_funding_id AND a.hot
                          AND (a.code LIKE 'promo\_deferred:%') = (p_kind = 'promotional'))
    THEN
        RAISE EXCEPTION 'grant "%": a wallet and an account of the platform that pays are needed; promo_deferred'
            ' for promotional credit, and for no other', p_key USING ERRCODE = 'AX006';
    END IF;
    SELECT b.journal_id, b.replayed INTO journal_id, replayed
      FROM ledger_book('grant', p_key, 'grant', p_currency, ledger_transfer(p_funding_id, p_account_id, p_amount),
                       p_actor, terms, NULL, NULL, false, NULL, terms) b;
    SELECT g.id INTO STRICT grant_id FROM credit_grant g WHERE g.journal_id = credit_grant_create.journal_id;
    RETURN NEXT;
END $$;

-- Takes from a grant what is not to be spent any more: back to where it came from or, when the customer has
-- paid for it, to breakage. Under the wallet's lock, so that the number of its uses can name the journal.
CREATE OR REPLACE FUNCTION grant_take(p_grant credit_grant, p_amount numeric, p_kind text, p_actor text, p_note text)
RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    step bigint := (SELECT count(*) FROM grant_use u WHERE u.grant_id = p_grant.id);
    target bigint;
BEGIN
    IF p_kind = 'grant_expiry' AND p_grant.kind IN ('paid', 'refund') THEN
        target := account_open('breakage:' || p_grant.amount_currency, 'platform', p_grant.amount_currency,
                               'revenue', true);
    ELSE
        SELECT e.account_id INTO STRICT target FROM ledger_entries e
         WHERE e.journal_id = p_grant.journal_id AND e.amount < 0;
    END IF;
    PERFORM ledger_book(p_kind, p_grant.id || '.' || step, p_kind, p_grant.amount_currency,
                        ledger_transfer(p_grant.account_id, target, p_amount), p_actor,
                        jsonb_build_object('grant', p_grant.id, 'note', p_note), NULL, NULL, false, NULL,
                        NULL, p_grant.id);
END $$;

-- Books the end of grants whose time is over, at most p_limit wallets; gives how many grants lost something.
-- What open holds of the wallet may still need stays until they are closed.
CREATE OR REPLACE FUNCTION grant_expire_due(p_limit int) RETURNS int
LANGUAGE plpgsql SECURITY DEFINER SET search_path = public, pg_temp AS $$
DECLARE
    wallet record;
    due credit_grant;
    left_over numeric;
    taken numeric;
    expired int := 0;
BEGIN
    FOR wallet IN
        SELECT b.account_id, b.held FROM ledger_balance b
         WHERE b.account_id IN (
             SELECT g.account_id FROM credit_grant g JOIN ledger_balance o ON o.account_id = g.account_id
              WHERE g.remaining > 0 AND g.expires_at <= clock_timestamp()
              GROUP BY g.account_id, o.held HAVING sum(g.remaining) > o.held
              ORDER BY min(g.expires_at) LIMIT p_limit)
         ORDER BY b.account_id FOR NO KEY UPDATE
    LOOP
        left_over := grant_expired(wallet.account_id, clock_timestamp()) - wallet.held;
        -- The last in the order of draws first: a hold would draw on the others.
        FOR due IN
            SELECT * FROM credit_grant g
             WHERE g.account_id = wallet.account_id AND g.remaining > 0 AND g.expires_at <= clock_timestamp()
             ORDER BY g.kind = 'promotional', g.expires_at DESC, g.priority DESC, g.id DESC
        LOOP
            taken := least(due.remaining, left_over);
            EXIT WHEN taken <= 0;
            left_over := left_over - taken;
            PERFORM grant_take(due, taken, 'grant_expiry', 'system:expiry', '');
            expired := expired + 1;
        END LOOP;
    END LOOP;
    RETURN expired;
END $$;

-- Takes back what is left of a grant, as far as no hold needs it; gives the amount.
CREATE OR REPLACE FUNCTION grant_revoke(p_grant_id bigint, p_reason text, p_actor text) RETURNS numeric
LANGUAGE plpgsql SECURITY DEFINER SET search_path = public, pg_temp AS $$
DECLARE
    revoked credit_grant;
    free numeric;
BEGIN
    IF coalesce(p_reason, '') = '' THEN
        RAISE EXCEPTION 'revocation of grant %: a reason is needed', p_grant_id USING ERRCODE = 'AX006';
    END IF;
    SELECT b.posted - b.held - b.floor INTO free FROM ledger_balance b
     WHERE b.account_id = (SELECT g.account_id FROM credit_grant g WHERE g.id = p_grant_id) FOR NO KEY UPDATE;
    SELECT * INTO revoked FROM credit_grant g WHERE g.id = p_grant_id;
    IF revoked.id IS NULL THEN
        RAISE EXCEPTION 'there is no grant %', p_grant_id USING ERRCODE = 'AX006';
    END IF;
    free := greatest(0, least(revoked.remaining, free));
    IF free > 0 THEN
        PERFORM grant_take(revoked, free, 'grant_revocation', p_actor, p_reason);
    END IF;
    RETURN free;
END $$;

-- Promised credit becomes an expense when it is used: one journal per currency for all that was used (or
-- given back) since the last time. Gives how many grants it was for.
CREATE OR REPLACE FUNCTION grant_recognise(p_limit int) RETURNS int
LANGUAGE plpgsql SECURITY DEFINER SET search_path = public, pg_temp AS $$
DECLARE
    due record;
    recognised int := 0;
BEGIN
    -- One at a time: two would book the same.
    IF NOT pg_try_advisory_xact_lock(hashtext('grant_recognise')) THEN
        RETURN 0;
    END IF;
    FOR due IN
        WITH used AS (
            SELECT g.id, g.amount_currency, g.recognised, sum(u.amount) AS used
              FROM credit_grant g
              JOIN grant_use u ON u.grant_id = g.id
              JOIN ledger_journal j ON j.id = u.journal_id AND j.kind NOT IN ('grant_expiry', 'grant_revocation')
             WHERE g.kind = 'promotional' AND j.reverses_id IS DISTINCT FROM g.journal_id
             GROUP BY g.id HAVING sum(u.amount) <> g.recognised
             ORDER BY g.id LIMIT p_limit
        ), marked AS (
            UPDATE credit_grant g SET recognised = u.used FROM used u WHERE g.id = u.id
        )
        SELECT u.amount_currency AS currency, sum(u.used - u.recognised) AS amount, count(*) AS grants,
               jsonb_object_agg(u.id, u.used - u.recognised) AS by_grant
          FROM used u GROUP BY u.amount_currency
    LOOP
        recognised := recognised + due.grants;
        CONTINUE WHEN due.amount = 0;
        PERFORM ledger_book(
            'promo_recognition', gen_random_uuid()::text, 'promo_recognition', due.currency,
            ledger_transfer(
                account_open('promo_expense:' || due.currency, 'platform', due.currency, 'expense', true),
                account_open('promo_deferred:' || due.currency, 'platform', due.currency, 'asset', true), due.amount),
            'system:recognition', jsonb_build_object('grants', due.by_grant), NULL, NULL, false, NULL);
    END LOOP;
    RETURN recognised;
END $$;
