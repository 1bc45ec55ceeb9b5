-- Budgets: what a key, a project or a customer may spend in a day or a month of the customer's time zone.
--
-- A budget is checked under the lock that hold_create takes on the wallet, in the same statement as the
-- hold: no number of gateways can overspend it, and a refusal takes its hold along.
--
-- Spending has two parts. brokerage_budget.spent is what answers of this window have cost and that is
-- final; brokerage_budgetedhold has a row for each hold that is not final yet. Rows are folded into `spent`
-- by the next admission, by what ledger_hold and usage_event say of them. So a hold that ends counts right
-- however it ended (charged, voided, expired), and nobody has to remember to release a budget.
-- An answer belongs to the window in which it was admitted.

-- The first instant of a local date. Midnight may not exist (then it is the moment of the change) or come
-- twice (then it is the first one; PostgreSQL would take the second).
CREATE OR REPLACE FUNCTION budget_midnight(p_local timestamp, p_zone text) RETURNS timestamptz
LANGUAGE sql STABLE AS $$
    SELECT CASE WHEN (later - interval '1 hour') AT TIME ZONE p_zone = p_local
                THEN later - interval '1 hour' ELSE later END
      FROM (SELECT p_local AT TIME ZONE p_zone AS later) m
$$;

-- The window, [window_start, window_end), of p_period ('daily', 'monthly') that p_moment lies in.
CREATE OR REPLACE FUNCTION budget_window(
    p_moment timestamptz, p_period text, p_zone text, OUT window_start timestamptz, OUT window_end timestamptz
)
LANGUAGE sql STABLE AS $$
    SELECT budget_midnight(first_day, p_zone),
           budget_midnight(first_day + CASE p_period WHEN 'daily' THEN interval '1 day'
                                                     ELSE interval '1 month' END, p_zone)
      FROM (SELECT date_trunc(CASE p_period WHEN 'daily' THEN 'day' ELSE 'month' END,
                              p_moment AT TIME ZONE p_zone) AS first_day) d
$$;

-- Whether a budget counts what that key asked for. A key stays in its project for life.
CREATE OR REPLACE FUNCTION budget_covers(p_budget_key uuid, p_budget_project uuid, p_api_key uuid) RETURNS boolean
LANGUAGE sql STABLE AS $$
    SELECT CASE WHEN p_budget_key IS NOT NULL THEN p_budget_key = p_api_key
                WHEN p_budget_project IS NOT NULL
                THEN EXISTS (SELECT 1 FROM brokerage_apikey k
                              WHERE k.id = p_api_key AND k.project_id = p_budget_project)
                ELSE true END
$$;

-- Where each budget of a customer stands: `spent` is final, `held` is for answers that are under way.
CREATE OR REPLACE FUNCTION budget_status(p_customer uuid)
RETURNS TABLE (budget_id bigint, api_key_id uuid, project_id uuid, period text, amount numeric, spent numeric, held numeric,
               window_start timestamptz, window_end timestamptz, time_zone text)
LANGUAGE sql STABLE AS $$
    SELECT b.id, b.api_key_id, b.project_id, b.period, b.amount,
           CASE WHEN b.window_start = w.window_start THEN b.spent ELSE 0 END + rows.spent, rows.held,
           w.window_start, w.window_end, c.time_zone
      FROM brokerage_budget b
      JOIN brokerage_customer c ON c.id = b.customer_id
      CROSS JOIN LATERAL budget_window(clock_timestamp(), b.period, c.time_zone) w
      CROSS JOIN LATERAL (
          SELECT coalesce(sum(h.amount) FILTER (WHERE u.charged_at IS NULL AND h.state = 'open'), 0) AS held,
                 coalesce(sum(coalesce(u.amount, h.captured)) FILTER (
                     WHERE u.charged_at IS NOT NULL OR h.state <> 'open'), 0) AS spent
            FROM brokerage_budgetedhold e
            JOIN ledger_hold h ON h.id = e.hold_id
            LEFT JOIN usage_event u ON u.request_id = e.request_id
           WHERE e.customer_id = b.customer_id AND e.admitted_at >= w.window_start
             AND budget_covers(b.api_key_id, b.project_id, e.api_key_id)) rows
     WHERE b.customer_id = p_customer
$$;

-- Begins windows anew and folds what is final. The caller has the wallet's lock. An expired hold stays a
-- row until its answer is charged after all, or until no window has it.
CREATE OR REPLACE FUNCTION budget_fold(p_customer uuid) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    UPDATE brokerage_budget b SET window_start = s.window_start, spent = 0
      FROM budget_status(p_customer) s
     WHERE b.id = s.budget_id AND b.window_start <> s.window_start;
    WITH final AS (
        SELECT e.request_id, e.api_key_id, e.admitted_at, coalesce(u.amount, h.captured) AS amount
          FROM brokerage_budgetedhold e
          JOIN ledger_hold h ON h.id = e.hold_id
          LEFT JOIN usage_event u ON u.request_id = e.request_id
         WHERE e.customer_id = p_customer AND (u.charged_at IS NOT NULL OR h.state IN ('captured', 'voided'))
    ), removed AS (
        DELETE FROM brokerage_budgetedhold e USING final f WHERE e.request_id = f.request_id
    )
    UPDATE brokerage_budget b SET spent = b.spent + s.amount
      FROM (SELECT b.id, sum(f.amount) AS amount
              FROM brokerage_budget b
              JOIN final f ON f.admitted_at >= b.window_start
                          AND budget_covers(b.api_key_id, b.project_id, f.api_key_id)
             WHERE b.customer_id = p_customer
             GROUP BY b.id) s
     WHERE b.id = s.id;
    DELETE FROM brokerage_budgetedhold e
     WHERE e.customer_id = p_customer
       AND e.admitted_at < (SELECT min(b.window_start) FROM brokerage_budget b WHERE b.customer_id = p_customer);
END $$;

-- hold_create within the budgets of key, project and customer: its errors, and AB001 for a budget that has not
-- enough left (of several the one to wait longest for), told in DETAIL as JSON.
CREATE OR REPLACE FUNCTION budget_hold_create(
    p_account_id bigint, p_amount numeric, p_currency text, p_key text, p_ttl interval, p_actor text,
    p_customer uuid, p_api_key uuid
) RETURNS bigint
LANGUAGE plpgsql AS $$
DECLARE
    placed record;
    short record;
BEGIN
    SELECT h.hold_id, h.replayed INTO STRICT placed
      FROM hold_create(p_account_id, p_amount, p_currency, p_key, p_ttl, p_actor) h;
    -- From here on the wallet is locked, and each statement sees what the one before it committed.
    IF placed.replayed OR NOT EXISTS (SELECT 1 FROM brokerage_budget b WHERE b.customer_id = p_customer) THEN
        RETURN placed.hold_id;
    END IF;
    PERFORM budget_fold(p_customer);
    SELECT s.* INTO short
      FROM budget_status(p_customer) s
     WHERE budget_covers(s.api_key_id, s.project_id, p_api_key) AND s.spent + s.held + p_amount > s.amount
     ORDER BY s.spent + p_amount > s.amount DESC, s.window_end DESC, s.amount - s.spent - s.held
     LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION 'hold "%": budget % has % left, % is required', p_key, short.budget_id,
            short.amount - short.spent - short.held, p_amount
            USING ERRCODE = 'AB001', DETAIL = json_build_object(
                'of', CASE WHEN short.api_key_id IS NOT NULL THEN 'key'
                           WHEN short.project_id IS NOT NULL THEN 'project' ELSE 'customer' END,
                'project', (SELECT p.name FROM brokerage_project p WHERE p.id = short.project_id),
                'period', short.period, 'amount', short.amount::text,
                'spent', short.spent::text, 'held', short.held::text, 'time_zone', short.time_zone,
                'ends_at', extract(epoch FROM short.window_end)::bigint,
                'ends_in_s', ceil(extract(epoch FROM short.window_end - clock_timestamp()))::bigint)::text;
    END IF;
    INSERT INTO brokerage_budgetedhold (request_id, hold_id, customer_id, api_key_id, admitted_at)
        VALUES (p_key::uuid, placed.hold_id, p_customer, p_api_key, clock_timestamp());
    RETURN placed.hold_id;
END $$;

-- Waits for the admissions of a wallet and keeps later ones waiting until the transaction ends. As its
-- owner: the application may not lock the ledger's rows by itself.
CREATE OR REPLACE FUNCTION budget_lock_wallet(p_customer uuid) RETURNS void
LANGUAGE sql SECURITY DEFINER SET search_path = public, pg_temp AS $$
    SELECT FROM ledger_balance b
     WHERE b.account_id = (SELECT a.id FROM ledger_account a WHERE a.code = 'customer_credit:' || p_customer)
       FOR NO KEY UPDATE
$$;

-- Counts all budgets of a customer anew, from holds and usage: for a budget that is new in mid-window, and
-- for another time zone. The caller has locked the wallet. Holds name their key as 'api_key:<uuid>'.
CREATE OR REPLACE FUNCTION budget_recount(p_customer uuid) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO brokerage_budgetedhold (request_id, hold_id, customer_id, api_key_id, admitted_at)
        SELECT h.key::uuid, h.id, p_customer, substr(h.actor, 9)::uuid, h.created_at
          FROM ledger_hold h
         WHERE h.account_id = (SELECT a.id FROM ledger_account a WHERE a.code = 'customer_credit:' || p_customer)
           AND h.state = 'open' AND h.actor LIKE 'api\_key:%'
        ON CONFLICT (request_id) DO NOTHING;
    PERFORM budget_fold(p_customer);
    UPDATE brokerage_budget b SET spent = coalesce(
        (SELECT sum(u.amount) FROM usage_event u
          WHERE u.customer_id = p_customer AND u.charged_at IS NOT NULL
            -- The second condition follows from the first and is the one that has an index.
            AND u.started_at >= b.window_start AND u.finished_at >= b.window_start
            AND budget_covers(b.api_key_id, b.project_id, u.api_key_id)), 0)
     WHERE b.customer_id = p_customer;
END $$;
