ALTER TABLE quotas DROP CONSTRAINT ck_quotas_quota;
ALTER TABLE quotas ADD CONSTRAINT ck_quotas_quota CHECK (
    quota ~ '^([1-9][0-9]{0,14}|[1-9][0-9]{0,14} tokens|[1-9][0-9]{0,11} gpu-ms|([1-9][0-9]{0,8}(\.[0-9]{1,6})?|0\.[0-9]{0,4}[1-9]0?) gpu-s|([1-9][0-9]{0,4}(\.[0-9]{1,6})?|0\.[0-9]{0,4}[1-9]0?) gpu-h|([1-9][0-9]{0,5}(\.[0-9]{1,6})?|0\.[0-9]{0,4}[1-9]0?) usd) ?(/|per) ?([1-9][0-9]{0,3})? ?(second|minute|hour|day|month|year)s?$'
);
COMMENT ON TABLE quotas IS 'Requests, GPU time, tokens or money per period, of a customer or of each customer of a tier.';
COMMENT ON COLUMN quotas.quota IS 'Such as 10000/day (requests), 3600 gpu-s/day, 1000000 tokens/day or 100 usd/month.';

-- Another migration may have added these already.
ALTER TABLE requests ADD COLUMN IF NOT EXISTS cost_ms DOUBLE PRECISION;
COMMENT ON COLUMN requests.cost_ms IS 'Its measured share of its batch''s GPU time; null: not measured.';

CREATE TABLE IF NOT EXISTS prices (
    model TEXT NOT NULL,
    usd_per_gpu_s DOUBLE PRECISION,
    usd_per_1k_tokens DOUBLE PRECISION,
    valid_from TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    CONSTRAINT pk_prices PRIMARY KEY (model, valid_from),
    CONSTRAINT ck_prices_usd_per_gpu_s CHECK (usd_per_gpu_s BETWEEN 0 AND 1000000),
    CONSTRAINT ck_prices_usd_per_1k_tokens CHECK (usd_per_1k_tokens BETWEEN 0 AND 1000000)
);
COMMENT ON TABLE prices IS 'Prices of models; the one with the latest valid_from that has passed counts.';
COMMENT ON COLUMN prices.model IS 'Name in requests.';
COMMENT ON COLUMN prices.usd_per_gpu_s IS 'Of a second of GPU time, USD; null: free.';
COMMENT ON COLUMN prices.usd_per_1k_tokens IS 'Of 1,000 tokens, USD; null: free.';
COMMENT ON COLUMN prices.valid_from IS 'From when it counts.';

CREATE OR REPLACE TRIGGER prices_changed AFTER INSERT OR UPDATE OR DELETE OR TRUNCATE ON prices
    FOR EACH STATEMENT EXECUTE FUNCTION bump_catalog_version();
CREATE OR REPLACE TRIGGER prices_added_or_deleted AFTER INSERT OR DELETE ON prices
    FOR EACH ROW EXECUTE FUNCTION record_config_change('model');
CREATE OR REPLACE TRIGGER prices_updated AFTER UPDATE ON prices
    FOR EACH ROW WHEN (OLD.* IS DISTINCT FROM NEW.*) EXECUTE FUNCTION record_config_change('model');
