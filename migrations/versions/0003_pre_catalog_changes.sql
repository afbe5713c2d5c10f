INSERT INTO catalog_version (single, version) VALUES (true, 1);

-- Once per statement: count the version up and say so. The row's lock makes writers of the catalog take turns, so
-- versions are committed in the order of their numbers.
CREATE FUNCTION bump_catalog_version() RETURNS trigger
LANGUAGE plpgsql AS $$
DECLARE
    counted bigint;
BEGIN
    INSERT INTO catalog_version AS v (single, version) VALUES (true, 1)
    ON CONFLICT (single) DO UPDATE SET version = v.version + 1, changed_at = clock_timestamp()
    RETURNING v.version INTO counted;
    PERFORM pg_notify('tierlane_catalog', counted::text);
    RETURN NULL;
END
$$;
COMMENT ON FUNCTION bump_catalog_version() IS 'Counts catalog_version up and notifies tierlane_catalog.';

-- Once per row: who changed what. The first trigger argument names the primary key's column.
CREATE FUNCTION record_config_change() RETURNS trigger
LANGUAGE plpgsql AS $$
DECLARE
    old_row jsonb := CASE WHEN TG_OP <> 'INSERT' THEN to_jsonb(OLD) - 'secret_hash' END;
    new_row jsonb := CASE WHEN TG_OP <> 'DELETE' THEN to_jsonb(NEW) - 'secret_hash' END;
BEGIN
    INSERT INTO config_changes (changed_by, table_name, row_key, old, new) VALUES (
        coalesce(nullif(current_setting('tierlane.actor', true), ''), session_user),
        TG_TABLE_NAME, coalesce(new_row, old_row) ->> TG_ARGV[0], old_row, new_row
    );
    RETURN NULL;
END
$$;
COMMENT ON FUNCTION record_config_change() IS 'Writes a row of config_changes; SET tierlane.actor to name a person.';

-- More than the whole capacity cannot be guaranteed. A constraint trigger, so that it looks at the end of a statement
-- (or of the transaction, with SET CONSTRAINTS tiers_guaranteed_shares DEFERRED).
CREATE FUNCTION check_guaranteed_shares() RETURNS trigger
LANGUAGE plpgsql AS $$
DECLARE
    total double precision;
BEGIN
    -- Two transactions that each raise a share take turns here, and the second sees what the first committed.
    PERFORM FROM catalog_version FOR UPDATE;
    SELECT sum(guaranteed_share) INTO total FROM tiers;
    IF total > 1.000000001 THEN
        RAISE EXCEPTION 'the guaranteed shares of all tiers add up to %, more than 1', round(total::numeric, 4)
            USING ERRCODE = 'check_violation', CONSTRAINT = 'tiers_guaranteed_shares', TABLE = 'tiers',
                  HINT = 'Lower another tier''s guaranteed_share in the same statement.';
    END IF;
    RETURN NULL;
END
$$;
COMMENT ON FUNCTION check_guaranteed_shares() IS 'Refuses guaranteed shares that add up to more than 1.';

CREATE CONSTRAINT TRIGGER tiers_guaranteed_shares AFTER INSERT OR UPDATE OF guaranteed_share ON tiers
    DEFERRABLE INITIALLY IMMEDIATE FOR EACH ROW EXECUTE FUNCTION check_guaranteed_shares();

CREATE TRIGGER tiers_changed AFTER INSERT OR UPDATE OR DELETE OR TRUNCATE ON tiers
    FOR EACH STATEMENT EXECUTE FUNCTION bump_catalog_version();
CREATE TRIGGER tiers_added_or_deleted AFTER INSERT OR DELETE ON tiers
    FOR EACH ROW EXECUTE FUNCTION record_config_change('name');
CREATE TRIGGER tiers_updated AFTER UPDATE ON tiers
    FOR EACH ROW WHEN (OLD.* IS DISTINCT FROM NEW.*) EXECUTE FUNCTION record_config_change('name');

CREATE TRIGGER customers_changed AFTER INSERT OR UPDATE OR DELETE OR TRUNCATE ON customers
    FOR EACH STATEMENT EXECUTE FUNCTION bump_catalog_version();
CREATE TRIGGER customers_added_or_deleted AFTER INSERT OR DELETE ON customers
    FOR EACH ROW EXECUTE FUNCTION record_config_change('id');
CREATE TRIGGER customers_updated AFTER UPDATE ON customers
    FOR EACH ROW WHEN (OLD.* IS DISTINCT FROM NEW.*) EXECUTE FUNCTION record_config_change('id');

CREATE TRIGGER quotas_changed AFTER INSERT OR UPDATE OR DELETE OR TRUNCATE ON quotas
    FOR EACH STATEMENT EXECUTE FUNCTION bump_catalog_version();
CREATE TRIGGER quotas_added_or_deleted AFTER INSERT OR DELETE ON quotas
    FOR EACH ROW EXECUTE FUNCTION record_config_change('id');
CREATE TRIGGER quotas_updated AFTER UPDATE ON quotas
    FOR EACH ROW WHEN (OLD.* IS DISTINCT FROM NEW.*) EXECUTE FUNCTION record_config_change('id');

CREATE TRIGGER models_changed AFTER INSERT OR UPDATE OR DELETE OR TRUNCATE ON models
    FOR EACH STATEMENT EXECUTE FUNCTION bump_catalog_version();
CREATE TRIGGER models_added_or_deleted AFTER INSERT OR DELETE ON models
    FOR EACH ROW EXECUTE FUNCTION record_config_change('name');
CREATE TRIGGER models_updated AFTER UPDATE ON models
    FOR EACH ROW WHEN (OLD.* IS DISTINCT FROM NEW.*) EXECUTE FUNCTION record_config_change('name');

-- Not for last_used_at, which the auditor writes all day and which changes nothing for a gateway.
CREATE TRIGGER api_keys_changed
    AFTER INSERT OR UPDATE OF id, customer_id, name, secret_hash, created_at, expires_at, revoked_at OR DELETE OR TRUNCATE
    ON api_keys FOR EACH STATEMENT EXECUTE FUNCTION bump_catalog_version();
CREATE TRIGGER api_keys_added_or_deleted AFTER INSERT OR DELETE ON api_keys
    FOR EACH ROW EXECUTE FUNCTION record_config_change('id');
CREATE TRIGGER api_keys_updated
    AFTER UPDATE OF id, customer_id, name, secret_hash, created_at, expires_at, revoked_at ON api_keys
    FOR EACH ROW WHEN (OLD.* IS DISTINCT FROM NEW.*) EXECUTE FUNCTION record_config_change('id');
