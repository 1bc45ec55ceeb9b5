-- Leases: credit that a gateway sets aside for a wallet beforehand, so that a request costs no round trip.
--
-- A lease is a hold (key 'lease:...') that is never captured. What an answer cost is carved out of it when
-- its usage is stored: a hold of its own with the request's id, which is charged like any other. Carving
-- moves nothing on the balance, so wallet, holds and books agree at every moment.

-- Takes a share of what is available, at most p_wanted; nothing (NULL) when that is less than p_least, or
-- when the customer has budgets: those are checked request by request. Nothing either for a while after the
-- wallet was called for (lease_call_back).
CREATE OR REPLACE FUNCTION lease_take(
    p_account_id bigint, p_currency text, p_customer uuid, p_key text, p_wanted numeric, p_least numeric,
    p_share int, p_ttl interval, OUT hold_id bigint, OUT amount numeric
)
LANGUAGE plpgsql AS $$
BEGIN
    SELECT trunc(least(p_wanted, (b.posted - b.held - b.floor) / p_share), 9) INTO amount
      FROM ledger_balance b WHERE b.account_id = p_account_id;
    IF amount IS NULL OR amount < p_least OR EXISTS (
        SELECT FROM brokerage_leasecall c
         WHERE c.account_id = p_account_id AND c.called_at > clock_timestamp() - interval '5 seconds'
    ) THEN
        amount := NULL;
        RETURN;
    END IF;
    SELECT h.hold_id INTO STRICT hold_id
      FROM hold_create(p_account_id, amount, p_currency, p_key, p_ttl, 'gateway:lease') h;
    -- The wallet is locked now, and setting a budget locks it too.
    IF EXISTS (SELECT 1 FROM brokerage_budget b WHERE b.customer_id = p_customer) THEN
        PERFORM hold_void(hold_id);
        hold_id := NULL;
        amount := NULL;
    END IF;
END $$;

-- Carves a hold for each request out of its lease; the id of the one that there is when it was done before.
-- From a lease that is over, or has not enough, comes a hold that is expired: its answer was delivered, and
-- is charged as one whose own hold had expired.
CREATE OR REPLACE FUNCTION lease_carve(
    p_leases bigint[], p_requests uuid[], p_amounts numeric[], p_customers uuid[], p_api_keys uuid[],
    p_started timestamptz[], OUT request_id uuid, OUT hold_id bigint
) RETURNS SETOF record
LANGUAGE plpgsql SECURITY DEFINER SET search_path = public, pg_temp AS $$
#variable_conflict use_column
DECLARE
    item record;
    lease ledger_hold;
    covered boolean;
    moment timestamptz;
BEGIN
    PERFORM 1 FROM ledger_balance b
      WHERE b.account_id IN (SELECT h.account_id FROM ledger_hold h WHERE h.id = ANY (p_leases))
      ORDER BY b.account_id FOR NO KEY UPDATE;
    moment := clock_timestamp();
    FOR item IN
        SELECT * FROM unnest(p_leases, p_requests, p_amounts, p_customers, p_api_keys, p_started)
            AS i (lease, request, amount, customer, api_key, started)
    LOOP
        request_id := item.request;
        SELECT h.id INTO hold_id FROM ledger_hold h WHERE h.key = item.request::text;
        IF FOUND THEN
            RETURN NEXT;
            CONTINUE;
        END IF;
        SELECT * INTO STRICT lease FROM ledger_hold h WHERE h.id = item.lease AND h.key LIKE 'lease:%';
        covered := lease.state = 'open' AND lease.amount >= item.amount;
        INSERT INTO ledger_hold (account_id, amount, amount_currency, key, state, captured, actor, ttl,
                                 created_at, expires_at, closed_at)
            VALUES (lease.account_id, item.amount, lease.amount_currency, item.request::text,
                    CASE WHEN covered THEN 'open' ELSE 'expired' END, 0, 'api_key:' || item.api_key, lease.ttl,
                    moment, moment + lease.ttl, CASE WHEN covered THEN NULL ELSE moment END)
            RETURNING id INTO hold_id;
        IF covered AND lease.amount > item.amount THEN
            UPDATE ledger_hold h SET amount = h.amount - item.amount WHERE h.id = lease.id;
        ELSIF covered THEN
            UPDATE ledger_hold h SET state = 'voided', closed_at = moment WHERE h.id = lease.id;
        END IF;
        -- A budget that was set while the answer was under way knows it from here on.
        INSERT INTO brokerage_budgetedhold (request_id, hold_id, customer_id, api_key_id, admitted_at)
            SELECT item.request, hold_id, item.customer, item.api_key, item.started
             WHERE EXISTS (SELECT 1 FROM brokerage_budget b WHERE b.customer_id = item.customer);
        RETURN NEXT;
    END LOOP;
END $$;

-- Gives back what of a lease no request needs any more. False when it was over already.
CREATE OR REPLACE FUNCTION lease_return(p_lease bigint, p_amount numeric) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = public, pg_temp AS $$
DECLARE
    lease ledger_hold;
BEGIN
    PERFORM 1 FROM ledger_balance b
      WHERE b.account_id = (SELECT h.account_id FROM ledger_hold h WHERE h.id = p_lease) FOR NO KEY UPDATE;
    SELECT * INTO lease FROM ledger_hold h WHERE h.id = p_lease AND h.key LIKE 'lease:%' AND h.state = 'open';
    IF NOT FOUND OR p_amount <= 0 THEN
        RETURN false;
    END IF;
    IF p_amount >= lease.amount THEN
        RETURN hold_void(p_lease);
    END IF;
    UPDATE ledger_hold h SET amount = h.amount - p_amount WHERE h.id = p_lease;
    UPDATE ledger_balance b SET held = b.held - p_amount, version = b.version + 1
     WHERE b.account_id = lease.account_id;
    RETURN true;
END $$;

-- Calls for what other gateways have leased of a wallet: they look twice a second. Says how much that is (0: nobody
-- is called) and whether there was a call just before, so that some may have come back already.
CREATE OR REPLACE FUNCTION lease_call_back(
    p_account_id bigint, p_own bigint[], OUT others numeric, OUT called_before boolean
)
LANGUAGE plpgsql AS $$
BEGIN
    SELECT coalesce(sum(h.amount), 0) INTO others
      FROM ledger_hold h
     WHERE h.account_id = p_account_id AND h.state = 'open' AND h.key LIKE 'lease:%' AND h.id <> ALL (p_own);
    called_before := EXISTS (
        SELECT FROM brokerage_leasecall c
         WHERE c.account_id = p_account_id AND c.called_at > clock_timestamp() - interval '2 seconds'
    );
    IF others > 0 THEN
        INSERT INTO brokerage_leasecall AS c (account_id, called_at) VALUES (p_account_id, clock_timestamp())
            ON CONFLICT (account_id) DO UPDATE SET called_at = clock_timestamp();
    END IF;
END $$;
