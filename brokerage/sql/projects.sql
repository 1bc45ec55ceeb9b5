-- Projects: each customer's default one, and keys that stay in theirs.

CREATE OR REPLACE FUNCTION project_make_default() RETURNS trigger
LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO brokerage_project (id, customer_id, name, is_default)
        VALUES (gen_random_uuid(), NEW.id, 'Default', true);
    RETURN NEW;
END $$;
CREATE OR REPLACE TRIGGER project_default AFTER INSERT ON brokerage_customer
    FOR EACH ROW EXECUTE FUNCTION project_make_default();

-- A key without a project goes into the default one. The lock keeps the project from being archived meanwhile.
CREATE OR REPLACE FUNCTION project_take_key() RETURNS trigger
LANGUAGE plpgsql AS $$
DECLARE
    archived boolean;
BEGIN
    IF TG_OP = 'UPDATE' THEN
        RAISE EXCEPTION 'API key %: a key stays in its project', OLD.id USING ERRCODE = 'restrict_violation';
    END IF;
    IF NEW.project_id IS NULL THEN
        SELECT p.id INTO NEW.project_id FROM brokerage_project p
         WHERE p.customer_id = NEW.customer_id AND p.is_default;
    END IF;
    SELECT p.archived_at IS NOT NULL INTO archived FROM brokerage_project p
     WHERE p.id = NEW.project_id FOR SHARE;
    IF archived THEN
        RAISE EXCEPTION 'project % is archived', NEW.project_id USING ERRCODE = 'restrict_violation';
    END IF;
    RETURN NEW;
END $$;
CREATE OR REPLACE TRIGGER project_key_made BEFORE INSERT ON brokerage_apikey
    FOR EACH ROW EXECUTE FUNCTION project_take_key();
CREATE OR REPLACE TRIGGER project_key_stays BEFORE UPDATE OF project_id ON brokerage_apikey
    FOR EACH ROW WHEN (OLD.project_id IS DISTINCT FROM NEW.project_id) EXECUTE FUNCTION project_take_key();
