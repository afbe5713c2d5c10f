ALTER TABLE tiers ADD COLUMN shadow BOOLEAN DEFAULT false NOT NULL;
COMMENT ON COLUMN tiers.shadow IS 'True: its limits and its shedding are judged and counted, but not enforced.';

ALTER TABLE api_keys ADD COLUMN requests_per_second DOUBLE PRECISION, ADD COLUMN burst DOUBLE PRECISION,
    ADD CONSTRAINT ck_api_keys_requests_per_second CHECK (requests_per_second > 0 AND requests_per_second <= 1000000),
    ADD CONSTRAINT ck_api_keys_burst CHECK (burst BETWEEN 1 AND 10000000),
    ADD CONSTRAINT ck_api_keys_limit CHECK ((requests_per_second IS NULL) = (burst IS NULL));
COMMENT ON COLUMN api_keys.requests_per_second IS
    'The key''s own rate limit beside its customer''s, requests per second; null = none.';
COMMENT ON COLUMN api_keys.burst IS 'The key''s own bucket size, requests; null where it has no limit of its own.';

-- How a gateway that holds a hundred thousand keys learns of one change. Its last picture was read in one snapshot of
-- PostgreSQL, and it kept that snapshot's name (pg_current_snapshot()). A row of config_changes that it can see now,
-- and whose transaction was not visible then, is a change since: exactly, whatever the order in which ids were given
-- out and transactions committed. What rows cannot tell counts whole_version up, and then everything is read.
ALTER TABLE config_changes ADD COLUMN xact BIGINT DEFAULT (pg_current_xact_id()::text)::bigint NOT NULL;
COMMENT ON COLUMN config_changes.xact IS 'Number of the transaction that made the change; readers tell by it what is new to them.';
CREATE INDEX ix_config_changes_xact ON config_changes (xact);
ALTER TABLE catalog_version ADD COLUMN whole_version BIGINT DEFAULT '0' NOT NULL;
COMMENT ON COLUMN catalog_version.whole_version IS
    'The last version that config_changes does not tell row by row; who has an older one reads everything.';

CREATE OR REPLACE FUNCTION bump_catalog_version() RETURNS trigger
LANGUAGE plpgsql AS $$
DECLARE
    counted bigint;
    -- TRUNCATE fires no row triggers; and changes that are deleted from the record may not have been read by everybody.
    untold boolean := TG_OP = 'TRUNCATE' OR TG_TABLE_NAME = 'config_changes';
BEGIN
    INSERT INTO catalog_version AS v (single, version, whole_version) VALUES (true, 1, 1)
    ON CONFLICT (single) DO UPDATE SET
        version = v.version + 1,
        whole_version = CASE WHEN untold THEN v.version + 1 ELSE v.whole_version END,
        changed_at = clock_timestamp()
    RETURNING v.version INTO counted;
    PERFORM pg_notify('tierlane_catalog', counted::text);
    RETURN NULL;
END
$$;
CREATE TRIGGER config_changes_edited AFTER UPDATE OR DELETE OR TRUNCATE ON config_changes
    FOR EACH STATEMENT EXECUTE FUNCTION bump_catalog_version();

-- As before with the new columns: not for last_used_at, which the auditor writes all day.
DROP TRIGGER api_keys_changed ON api_keys;
CREATE TRIGGER api_keys_changed
    AFTER INSERT OR DELETE OR TRUNCATE
        OR UPDATE OF id, customer_id, name, secret_hash, created_at, expires_at, revoked_at, requests_per_second, burst
    ON api_keys FOR EACH STATEMENT EXECUTE FUNCTION bump_catalog_version();
DROP TRIGGER api_keys_updated ON api_keys;
CREATE TRIGGER api_keys_updated
    AFTER UPDATE OF id, customer_id, name, secret_hash, created_at, expires_at, revoked_at, requests_per_second, burst
    ON api_keys FOR EACH ROW WHEN (OLD.* IS DISTINCT FROM NEW.*) EXECUTE FUNCTION record_config_change('id');

CREATE OR REPLACE VIEW customer_limits AS
SELECT c.id AS customer_id,
       c.name AS customer,
       c.status,
       t.name AS tier,
       t.priority,
       coalesce(c.requests_per_second, t.requests_per_second) AS requests_per_second,
       coalesce(c.burst, t.burst) AS burst,
       coalesce(c.max_concurrency, t.max_concurrency) AS max_concurrency,
       coalesce(c.tokens_per_minute, t.tokens_per_minute) AS tokens_per_minute,
       coalesce(c.max_queue_ms, t.max_queue_ms) AS max_queue_ms,
       t.shadow,
       ARRAY(
           SELECT DISTINCT q.quota FROM quotas AS q
           WHERE q.customer_id = c.id OR (q.customer_id IS NULL AND q.tier = c.tier) ORDER BY q.quota
       ) AS quotas
FROM customers AS c JOIN tiers AS t ON t.name = c.tier;

-- So that every answer can tell its client about tokens. Whoever set a limit keeps it.
UPDATE tiers SET tokens_per_minute = CASE name
    WHEN 'enterprise' THEN 60000000 WHEN 'paid' THEN 12000000 ELSE 2400000 END
WHERE name IN ('enterprise', 'paid', 'free') AND tokens_per_minute IS NULL;
