-- What customers have used, counted from the audit (ledger/audit/queries.py, ledger/audit/quota_restore.py).

-- name: set_statement_timeout
-- $1: milliseconds. Applies until the transaction ends.
SELECT set_config('statement_timeout', $1::bigint::text, true)

-- name: customer_usage
-- $1: customer. The last 24 hours. Uses the index on (customer_id, created_at).
SELECT count(*), count(*) FILTER (WHERE status = 'completed'), count(*) FILTER (WHERE status = 'failed'),
       coalesce(sum(tokens_used), 0)::bigint, extract(epoch FROM now())::bigint
FROM requests WHERE customer_id = $1 AND created_at > now() - interval '24 hours'

-- name: customer_gpu_share
-- $1: customer. $2: the lowest request id of the window. $3: only this tier; null: all. GPU milliseconds of the customer and of
-- all, and the accepted, completed and failed requests of the customer. Ids begin with the time, so the primary key is used.
SELECT coalesce(sum(r.cost_ms) FILTER (WHERE r.customer_id = $1), 0),
       coalesce(sum(r.cost_ms), 0),
       count(*) FILTER (WHERE r.customer_id = $1),
       count(*) FILTER (WHERE r.customer_id = $1 AND r.status = 'completed'),
       count(*) FILTER (WHERE r.customer_id = $1 AND r.status = 'failed')
FROM requests AS r
WHERE r.id >= $2 AND r.created_at > now() - interval '1 hour' AND ($3::text IS NULL OR r.tier = $3)

-- name: customer_errors
-- $1: customer. $2: row limit. The newest failed requests of the last hour.
SELECT id, created_at, model, error_code, http_status
FROM requests
WHERE customer_id = $1 AND created_at > now() - interval '1 hour' AND status = 'failed'
ORDER BY created_at DESC LIMIT $2

-- name: recent_workers
-- $1: the lowest request id of the window. Workers with their accepted requests and the newest of them. Uses the primary key.
SELECT worker_id, count(*), max(created_at)
FROM requests
WHERE id >= $1 AND created_at > now() - interval '1 hour' AND worker_id IS NOT NULL
GROUP BY worker_id ORDER BY worker_id

-- name: usage_export
-- $1: start. $2: end. $3: customer; null: all. Accepted requests by customer, key and model. The price of a request is that of its creation time. A row
-- has the tokens and the GPU time that are charged, whatever its status.
WITH priced AS (
    SELECT *, lead(valid_from, 1, 'infinity') OVER (PARTITION BY model ORDER BY valid_from) AS valid_until FROM prices
)
SELECT r.customer_id::text, c.name, r.api_key_id, r.model, count(*), coalesce(sum(r.tokens_used), 0)::bigint,
       coalesce(sum(r.cost_ms::numeric * 0.001), 0),
       CASE WHEN count(p.model) > 0 THEN coalesce(sum(
           coalesce(r.cost_ms::numeric * 0.001, 0) * p.usd_per_gpu_s + coalesce(r.tokens_used, 0) * 0.001 * p.usd_per_1000_tokens
       ), 0) END
FROM requests AS r
LEFT JOIN customers AS c ON c.id = r.customer_id
LEFT JOIN priced AS p ON p.model = r.model AND r.created_at >= p.valid_from AND r.created_at < p.valid_until
WHERE r.created_at >= $1 AND r.created_at < $2 AND ($3::uuid IS NULL OR r.customer_id = $3)
GROUP BY r.customer_id, c.name, r.api_key_id, r.model
ORDER BY c.name, r.customer_id, r.api_key_id, r.model

-- name: customer_usage_by
-- $1: customer. $2: start. $3: end. $4: day, model or key. $5: the group after which the page begins, or ''. $6: row limit. Figures as in
-- usage_export. Uses the index on (customer_id, created_at).
WITH priced AS (
    SELECT *, lead(valid_from, 1, 'infinity') OVER (PARTITION BY model ORDER BY valid_from) AS valid_until FROM prices
), own AS (
    SELECT r.*, CASE $4::text
        WHEN 'day' THEN to_char(r.created_at AT TIME ZONE 'UTC', 'YYYY-MM-DD')
        WHEN 'model' THEN coalesce(r.model, '')
        ELSE coalesce(r.api_key_id, '')
    END COLLATE "C" AS part
    FROM requests AS r WHERE r.customer_id = $1 AND r.created_at >= $2 AND r.created_at < $3
)
SELECT r.part, count(*), coalesce(sum(r.tokens_used), 0)::bigint, coalesce(sum(r.cost_ms::numeric * 0.001), 0)::float8,
       (CASE WHEN count(p.model) > 0 THEN coalesce(sum(
           coalesce(r.cost_ms::numeric * 0.001, 0) * p.usd_per_gpu_s + coalesce(r.tokens_used, 0) * 0.001 * p.usd_per_1000_tokens
       ), 0) END)::float8
FROM own AS r
LEFT JOIN priced AS p ON p.model = r.model AND r.created_at >= p.valid_from AND r.created_at < p.valid_until
WHERE r.part > $5
GROUP BY r.part ORDER BY r.part LIMIT $6

-- name: recorded_requests
-- $1: start. $2: end. $3: models. Accepted requests that waited for a run of their own, in order of creation.
SELECT created_at, customer_id::text, status, error_code, tokens_used, input_bytes, latency_ms, queue_ms, gpu_ms, batch_id,
       batch_size, worker_id
FROM requests
WHERE created_at >= $1 AND created_at < $2 AND model = ANY ($3::text[]) AND served_from IS NULL AND mode IS DISTINCT FROM 'direct'
ORDER BY created_at, id

-- name: clock_timestamp
SELECT clock_timestamp()

-- name: quota_spent
-- $1: start of the window. $2: its end. $3: customers. $4: error codes of failures that are charged. $5: keys that
-- have quotas, whose requests count together with those of keys that continue their quotas; null: all keys, counted as ''.
SELECT customer_id::text,
       CASE WHEN $5::text[] IS NULL THEN '' ELSE (SELECT coalesce(k.quota_key, k.id) FROM api_keys AS k WHERE k.id = api_key_id) END AS owner,
       count(*)
FROM requests
WHERE customer_id = ANY ($3::uuid[]) AND created_at >= $1 AND created_at < $2
  AND (status <> 'failed' OR error_code = ANY ($4::text[]) OR tokens_used > 0) -- A stream that was delivered in part.
  AND ($5::text[] IS NULL OR api_key_id IN (SELECT k.id FROM api_keys AS k WHERE coalesce(k.quota_key, k.id) = ANY ($5)))
GROUP BY customer_id, owner

-- name: quota_spent_gpu
-- Parameters as in quota_spent. Microseconds. Requests that shared the run of another one cost no GPU time.
SELECT customer_id::text,
       CASE WHEN $5::text[] IS NULL THEN '' ELSE (SELECT coalesce(k.quota_key, k.id) FROM api_keys AS k WHERE k.id = api_key_id) END AS owner,
       sum(round((cost_ms * 1000)::numeric))::bigint
FROM requests
WHERE customer_id = ANY ($3::uuid[]) AND created_at >= $1 AND created_at < $2
  AND (status = 'completed' OR error_code = ANY ($4::text[]) OR tokens_used > 0)
  AND ($5::text[] IS NULL OR api_key_id IN (SELECT k.id FROM api_keys AS k WHERE coalesce(k.quota_key, k.id) = ANY ($5)))
GROUP BY customer_id, owner

-- name: quota_spent_tokens
-- Parameters as in quota_spent.
SELECT customer_id::text,
       CASE WHEN $5::text[] IS NULL THEN '' ELSE (SELECT coalesce(k.quota_key, k.id) FROM api_keys AS k WHERE k.id = api_key_id) END AS owner,
       sum(tokens_used)::bigint
FROM requests
WHERE customer_id = ANY ($3::uuid[]) AND created_at >= $1 AND created_at < $2
  AND (status = 'completed' OR error_code = ANY ($4::text[]) OR tokens_used > 0)
  AND ($5::text[] IS NULL OR api_key_id IN (SELECT k.id FROM api_keys AS k WHERE coalesce(k.quota_key, k.id) = ANY ($5)))
GROUP BY customer_id, owner

-- name: quota_spent_usd
-- Parameters as in quota_spent. 1e-9 USD, at the prices when the requests were created.
SELECT r.customer_id::text,
       CASE WHEN $5::text[] IS NULL THEN '' ELSE (SELECT coalesce(k.quota_key, k.id) FROM api_keys AS k WHERE k.id = r.api_key_id) END AS owner,
       sum(round(coalesce(r.cost_ms::numeric * p.usd_per_gpu_s, 0) * 1e6 + coalesce(r.tokens_used * p.usd_per_1000_tokens, 0) * 1e6))::bigint
FROM requests AS r
CROSS JOIN LATERAL (SELECT usd_per_gpu_s, usd_per_1000_tokens FROM prices
                    WHERE model = r.model AND valid_from <= r.created_at ORDER BY valid_from DESC LIMIT 1) AS p
WHERE r.customer_id = ANY ($3::uuid[]) AND r.created_at >= $1 AND r.created_at < $2
  AND (r.status = 'completed' OR r.error_code = ANY ($4::text[]) OR r.tokens_used > 0)
  AND ($5::text[] IS NULL OR r.api_key_id IN (SELECT k.id FROM api_keys AS k WHERE coalesce(k.quota_key, k.id) = ANY ($5)))
GROUP BY r.customer_id, owner
