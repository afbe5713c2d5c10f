-- Partitions take it from their parent. No default and no CHECK: neither would be possible without reading all rows.
ALTER TABLE requests ADD COLUMN cost_ms DOUBLE PRECISION;
COMMENT ON COLUMN requests.cost_ms IS 'GPU time that it pays: its share of the run; null: not charged.';

CREATE TABLE prices (
    model TEXT NOT NULL,
    valid_from TIMESTAMPTZ NOT NULL DEFAULT now(),
    usd_per_gpu_s NUMERIC NOT NULL DEFAULT '0',
    usd_per_1000_tokens NUMERIC NOT NULL DEFAULT '0',
    CONSTRAINT pk_prices PRIMARY KEY (model, valid_from),
    CONSTRAINT ck_prices_usd_per_gpu_s CHECK (usd_per_gpu_s BETWEEN 0 AND 1000000),
    CONSTRAINT ck_prices_usd_per_1000_tokens CHECK (usd_per_1000_tokens BETWEEN 0 AND 1000000)
);
COMMENT ON TABLE prices IS 'Prices of models, for tierlane usage export. A row applies to later requests, until the next row of its model.';
COMMENT ON COLUMN prices.model IS 'Model, by name.';
COMMENT ON COLUMN prices.valid_from IS 'Creation time of the first request that it applies to.';
COMMENT ON COLUMN prices.usd_per_gpu_s IS 'USD for a second of GPU time.';
COMMENT ON COLUMN prices.usd_per_1000_tokens IS 'USD for 1,000 tokens of input and output.';
CREATE TRIGGER prices_added_or_deleted AFTER INSERT OR DELETE ON prices
    FOR EACH ROW EXECUTE FUNCTION record_config_change('model');
CREATE TRIGGER prices_updated AFTER UPDATE ON prices
    FOR EACH ROW WHEN (OLD.* IS DISTINCT FROM NEW.*) EXECUTE FUNCTION record_config_change('model');

CREATE OR REPLACE VIEW usage_hourly AS
SELECT date_trunc('hour', r.created_at) AS hour,
       r.customer_id,
       c.name AS customer,
       r.tier,
       r.model,
       count(*) AS requests,
       count(*) FILTER (WHERE r.status = 'completed') AS completed,
       count(*) FILTER (WHERE r.status = 'failed') AS failed,
       coalesce(sum(r.tokens_used), 0) AS tokens_used,
       coalesce(sum(r.input_bytes), 0) AS input_bytes,
       coalesce(sum(r.output_bytes), 0) AS output_bytes,
       coalesce(sum(r.gpu_ms / greatest(r.batch_size, 1)), 0) AS gpu_ms,
       coalesce(sum(r.cost_ms), 0) AS cost_ms
FROM requests AS r LEFT JOIN customers AS c ON c.id = r.customer_id
GROUP BY 1, 2, 3, 4, 5;
COMMENT ON VIEW usage_hourly IS
    'Accepted requests by hour, customer, tier and model; gpu_ms divides each batch''s time equally, cost_ms is the GPU time that was charged. Filter by hour.';
