CREATE VIEW customer_limits AS
SELECT c.id AS customer_id,
       c.name AS customer,
       c.status,
       t.name AS tier,
       t.priority,
       coalesce(c.requests_per_second, t.requests_per_second) AS requests_per_second,
       coalesce(c.burst, t.burst) AS burst,
       coalesce(c.max_concurrency, t.max_concurrency) AS max_concurrency,
       coalesce(c.tokens_per_minute, t.tokens_per_minute) AS tokens_per_minute,
       coalesce(c.max_queue_ms, t.max_queue_ms) AS max_queue_ms
FROM customers AS c JOIN tiers AS t ON t.name = c.tier;
COMMENT ON VIEW customer_limits IS
    'Base limits of each customer: its own where set, else its tier''s. The factor for present capacity comes on top.';

CREATE VIEW usage_hourly AS
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
       coalesce(sum(r.gpu_ms / greatest(r.batch_size, 1)), 0) AS gpu_ms
FROM requests AS r LEFT JOIN customers AS c ON c.id = r.customer_id
GROUP BY 1, 2, 3, 4, 5;
COMMENT ON VIEW usage_hourly IS
    'Accepted requests by hour, customer, tier and model; gpu_ms shares each batch''s time equally. Ask for a range of hour.';

-- A failure counts against the service only where the answer says that it was ours (5xx), not where the client left
-- (499) or sent what the model cannot take (422).
CREATE VIEW tier_slo AS
SELECT r.tier,
       count(*) AS requests,
       count(*) FILTER (WHERE r.status IN ('queued', 'processing')) AS open,
       count(*) FILTER (WHERE r.http_status >= 500) AS failed,
       1 - count(*) FILTER (WHERE r.http_status >= 500)::double precision
           / nullif(count(*) FILTER (WHERE r.http_status IS NOT NULL), 0) AS success_ratio,
       percentile_cont(0.5) WITHIN GROUP (ORDER BY r.latency_ms) FILTER (WHERE r.status = 'completed') AS p50_ms,
       percentile_cont(0.95) WITHIN GROUP (ORDER BY r.latency_ms) FILTER (WHERE r.status = 'completed') AS p95_ms,
       percentile_cont(0.99) WITHIN GROUP (ORDER BY r.latency_ms) FILTER (WHERE r.status = 'completed') AS p99_ms,
       percentile_cont(0.95) WITHIN GROUP (ORDER BY r.queue_ms) FILTER (WHERE r.status = 'completed') AS queue_p95_ms
FROM requests AS r
WHERE r.created_at > now() - interval '1 hour'
GROUP BY r.tier;
COMMENT ON VIEW tier_slo IS 'The last hour by tier: success and latency of accepted requests.';
