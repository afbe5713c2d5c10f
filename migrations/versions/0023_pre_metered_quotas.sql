ALTER TABLE quotas DROP CONSTRAINT ck_quotas_quota;
ALTER TABLE quotas ADD CONSTRAINT ck_quotas_quota CHECK (
    quota ~ '^([1-9][0-9]{0,14}|[1-9][0-9]{0,14} tokens|[1-9][0-9]{0,11} gpu-ms|([1-9][0-9]{0,8}(\.[0-9]{1,6})?|0\.[0-9]{0,4}[1-9]0?) gpu-s|([1-9][0-9]{0,4}(\.[0-9]{1,6})?|0\.[0-9]{0,4}[1-9]0?) gpu-h|([1-9][0-9]{0,5}(\.[0-9]{1,6})?|0\.[0-9]{0,4}[1-9]0?) usd) ?(/|per) ?([1-9][0-9]{0,3})? ?(second|minute|hour|day|month|year)s?$'
);
COMMENT ON TABLE quotas IS 'Requests, GPU time, tokens or money per period, of a customer or of each customer of a tier.';
COMMENT ON COLUMN quotas.quota IS 'Such as 10000/day (requests), 3600 gpu-s/day, 1000000 tokens/day or 100 usd/month.';

CREATE TRIGGER prices_changed AFTER INSERT OR UPDATE OR DELETE OR TRUNCATE ON prices
    FOR EACH STATEMENT EXECUTE FUNCTION bump_catalog_version();
