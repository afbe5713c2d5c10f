ALTER TABLE tiers ADD COLUMN slo_ms INTEGER;
ALTER TABLE tiers ADD COLUMN slo_success DOUBLE PRECISION;
COMMENT ON COLUMN tiers.slo_ms IS 'Objective of the p95 of the response time, milliseconds; null = none.';
COMMENT ON COLUMN tiers.slo_success IS 'Objective of the share of successful requests, such as 0.999; null = none.';
ALTER TABLE tiers ADD CONSTRAINT ck_tiers_slo_ms CHECK (slo_ms BETWEEN 1 AND 600000);
ALTER TABLE tiers ADD CONSTRAINT ck_tiers_slo_success CHECK (slo_success > 0 AND slo_success < 1);

CREATE OR REPLACE VIEW tier_slo AS
SELECT r.tier,
       count(*) AS requests,
       count(*) FILTER (WHERE r.status IN ('queued', 'processing')) AS open,
       count(*) FILTER (WHERE r.http_status >= 500) AS failed,
       1 - count(*) FILTER (WHERE r.http_status >= 500)::double precision
           / nullif(count(*) FILTER (WHERE r.http_status IS NOT NULL), 0) AS success_ratio,
       percentile_cont(0.5) WITHIN GROUP (ORDER BY r.latency_ms) FILTER (WHERE r.status = 'completed') AS p50_ms,
       percentile_cont(0.95) WITHIN GROUP (ORDER BY r.latency_ms) FILTER (WHERE r.status = 'completed') AS p95_ms,
       percentile_cont(0.99) WITHIN GROUP (ORDER BY r.latency_ms) FILTER (WHERE r.status = 'completed') AS p99_ms,
       percentile_cont(0.95) WITHIN GROUP (ORDER BY r.queue_ms) FILTER (WHERE r.status = 'completed') AS queue_p95_ms,
       max(t.slo_ms) AS slo_ms,
       max(t.slo_success) AS slo_success
FROM requests AS r LEFT JOIN tiers AS t ON t.name = r.tier
WHERE r.created_at > now() - interval '1 hour'
GROUP BY r.tier;
COMMENT ON VIEW tier_slo IS 'The last hour by tier: success and latency of accepted requests, and its objectives.';
