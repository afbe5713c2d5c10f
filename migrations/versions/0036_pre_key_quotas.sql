ALTER TABLE api_keys
    ADD COLUMN quotas TEXT[],
    ADD COLUMN quota_key TEXT,
    ADD CONSTRAINT ck_api_keys_quotas CHECK (
        array_ndims(quotas) = 1 AND cardinality(quotas) <= 10 AND array_position(quotas, NULL) IS NULL AND array_to_string(quotas, '') !~ ',' AND array_to_string(quotas, ',') ~ '^([1-9][0-9]{0,14}|[1-9][0-9]{0,14} tokens|[1-9][0-9]{0,11} gpu-ms|([1-9][0-9]{0,8}(\.[0-9]{1,6})?|0\.[0-9]{0,4}[1-9]0?) gpu-s|([1-9][0-9]{0,4}(\.[0-9]{1,6})?|0\.[0-9]{0,4}[1-9]0?) gpu-h|([1-9][0-9]{0,5}(\.[0-9]{1,6})?|0\.[0-9]{0,4}[1-9]0?) usd) ?(/|per) ?([1-9][0-9]{0,3})? ?(second|minute|hour|day|week|month|year)s?(,([1-9][0-9]{0,14}|[1-9][0-9]{0,14} tokens|[1-9][0-9]{0,11} gpu-ms|([1-9][0-9]{0,8}(\.[0-9]{1,6})?|0\.[0-9]{0,4}[1-9]0?) gpu-s|([1-9][0-9]{0,4}(\.[0-9]{1,6})?|0\.[0-9]{0,4}[1-9]0?) gpu-h|([1-9][0-9]{0,5}(\.[0-9]{1,6})?|0\.[0-9]{0,4}[1-9]0?) usd) ?(/|per) ?([1-9][0-9]{0,3})? ?(second|minute|hour|day|week|month|year)s?)*$'
    ),
    ADD CONSTRAINT ck_api_keys_quota_key CHECK (quota_key ~ '^[a-z0-9]{12}$');
COMMENT ON COLUMN api_keys.quotas IS 'Quotas beside its customer''s, such as 100 usd/month; null: none.';
COMMENT ON COLUMN api_keys.quota_key IS 'Key with which its quotas are counted together; null: only itself.';

-- A change of the quotas is followed too; last_used_at changes nothing for a gateway.
DROP TRIGGER api_keys_changed ON api_keys;
CREATE TRIGGER api_keys_changed
    AFTER INSERT OR DELETE OR TRUNCATE OR UPDATE OF
        id, customer_id, name, secret_hash, created_at, expires_at, revoked_at, requests_per_second, burst, weight, models,
        quotas, quota_key
    ON api_keys FOR EACH STATEMENT EXECUTE FUNCTION bump_catalog_version();
DROP TRIGGER api_keys_updated ON api_keys;
CREATE TRIGGER api_keys_updated
    AFTER UPDATE OF
        id, customer_id, name, secret_hash, created_at, expires_at, revoked_at, requests_per_second, burst, weight, models,
        quotas, quota_key
    ON api_keys FOR EACH ROW WHEN (OLD.* IS DISTINCT FROM NEW.*) EXECUTE FUNCTION record_config_change('id');
