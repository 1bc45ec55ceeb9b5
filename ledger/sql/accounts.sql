-- Opens an account, with its balance row unless it is hot. The same call again returns the same account.
CREATE OR REPLACE FUNCTION account_open(
    p_code text, p_owner text, p_currency text, p_type text, p_hot boolean, p_floor numeric DEFAULT 0
) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path = public, pg_temp AS $$
DECLARE
    account ledger_account;
    differing text[];
BEGIN
    IF coalesce(p_code, '') = '' OR p_currency !~ '^[A-Z]{3}$' OR p_currency IS NULL
        OR p_type NOT IN ('asset', 'liability', 'revenue', 'expense')
    THEN
        RAISE EXCEPTION 'account "%": code, three-letter currency and type are needed', p_code
            USING ERRCODE = 'AX006';
    END IF;
    INSERT INTO ledger_account (code, owner, currency, type, hot)
        VALUES (p_code, coalesce(p_owner, ''), p_currency, p_type, p_hot)
        ON CONFLICT (code) DO NOTHING RETURNING * INTO account;
    IF FOUND THEN
        IF NOT p_hot THEN
            INSERT INTO ledger_balance (account_id, posted, held, floor, granted, version)
                VALUES (account.id, 0, 0, p_floor, 0, 0);
        END IF;
        RETURN account.id;
    END IF;
    SELECT * INTO STRICT account FROM ledger_account a WHERE a.code = p_code;
    differing := array_remove(ARRAY[
        CASE WHEN account.owner <> coalesce(p_owner, '') THEN 'owner' END,
        CASE WHEN account.currency <> p_currency THEN 'currency' END,
        CASE WHEN account.type <> p_type THEN 'type' END,
        CASE WHEN account.hot <> p_hot THEN 'hot' END
    ], NULL);
    IF differing <> '{}' THEN
        RAISE EXCEPTION 'account "%" exists with another %', p_code, array_to_string(differing, ', ')
            USING ERRCODE = 'AX002', DETAIL = to_json(differing)::text;
    END IF;
    RETURN account.id;
END $$;

-- What the owner of a wallet owes us: an asset of its own for each wallet, so that each debt has a debtor.
CREATE OR REPLACE FUNCTION ledger_receivable_of(p_account_id bigint) RETURNS bigint
LANGUAGE sql AS $$
    SELECT account_open('customer_receivable:' || w.id, w.owner, w.currency, 'asset', true)
      FROM ledger_account w WHERE w.id = p_account_id
$$;

-- A time-ordered public id: PostgreSQL's own from 18 on, made by hand before.
DO $$
BEGIN
    IF current_setting('server_version_num')::int >= 180000 THEN
        CREATE OR REPLACE FUNCTION ledger_uuid7() RETURNS uuid LANGUAGE sql VOLATILE AS 'SELECT uuidv7()';
    ELSE
        CREATE OR REPLACE FUNCTION ledger_uuid7() RETURNS uuid LANGUAGE sql VOLATILE AS $f$
            SELECT encode(set_bit(set_bit(overlay(
                uuid_send(gen_random_uuid())
                PLACING substring(int8send((extract(epoch FROM clock_timestamp()) * 1000)::bigint) FROM 3)
                FROM 1 FOR 6), 52, 1), 53, 1), 'hex')::uuid
        $f$;
    END IF;
END $$;
