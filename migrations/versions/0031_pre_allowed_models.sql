ALTER TABLE customers
    ADD COLUMN models TEXT[],
    ADD CONSTRAINT ck_customers_models CHECK (
        array_ndims(models) = 1 AND cardinality(models) <= 100 AND array_position(models, NULL) IS NULL
        AND array_to_string(models, '') !~ ','
        AND array_to_string(models, ',') ~ '^[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}(,[A-Za-z0-9][A-Za-z0-9._:/-]{0,127})*$'
    );
COMMENT ON COLUMN customers.models IS 'Models that its keys may use; null: all.';

ALTER TABLE api_keys
    ADD COLUMN models TEXT[],
    ADD CONSTRAINT ck_api_keys_models CHECK (
        array_ndims(models) = 1 AND cardinality(models) <= 100 AND array_position(models, NULL) IS NULL
        AND array_to_string(models, '') !~ ','
        AND array_to_string(models, ',') ~ '^[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}(,[A-Za-z0-9][A-Za-z0-9._:/-]{0,127})*$'
    );
COMMENT ON COLUMN api_keys.models IS 'Models that it may use, of those of its customer; null: all of these.';

-- A change of the weight or of the models is followed too; last_used_at changes nothing for a gateway.
DROP TRIGGER api_keys_changed ON api_keys;
CREATE TRIGGER api_keys_changed
    AFTER INSERT OR DELETE OR TRUNCATE OR UPDATE OF
        id, customer_id, name, secret_hash, created_at, expires_at, revoked_at, requests_per_second, burst, weight, models
    ON api_keys FOR EACH STATEMENT EXECUTE FUNCTION bump_catalog_version();
DROP TRIGGER api_keys_updated ON api_keys;
CREATE TRIGGER api_keys_updated
    AFTER UPDATE OF
        id, customer_id, name, secret_hash, created_at, expires_at, revoked_at, requests_per_second, burst, weight, models
    ON api_keys FOR EACH ROW WHEN (OLD.* IS DISTINCT FROM NEW.*) EXECUTE FUNCTION record_config_change('id');
