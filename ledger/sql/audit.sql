-- Rows of requests (ledger/audit/writer.py, ledger/audit/queries.py).

-- name: create_staging_table
-- One for each session. The rows are deleted when the transaction ends.
CREATE TEMP TABLE IF NOT EXISTS audit_staging (LIKE requests) ON COMMIT DELETE ROWS

-- name: merge_requests
-- Merges the staged rows into requests. The accepted and the ended record of a request may arrive in either order, and
-- any number of times. A request ends once: queued -> completed or failed. Columns of the accepted record are filled in
-- where they are null. Columns of the ended record are written while the row is open, and replaced in three cases only:
-- * `abandoned` was assumed, so any recorded end replaces it;
-- * an end that was delivered to the client replaces an end that was not;
-- * a delivered 504 replaces a result that direct mode recorded and did not send.
-- ledger/audit/folding.py (`outweighs`) applies the same rule to two ends in one batch.
INSERT INTO requests AS r (
    id, created_at, customer_id, api_key_id, tier, model, status, error_code, http_status, completed_at,
    latency_ms, queue_ms, gpu_ms, batch_id, batch_size, worker_id, gateway_id, attempts, tokens_used,
    input_bytes, output_bytes, trace_id, mode, delivered, served_from, endpoint, cost_ms
)
SELECT
    id, created_at, customer_id, api_key_id, tier, model, status, error_code, http_status, completed_at,
    latency_ms, queue_ms, gpu_ms, batch_id, batch_size, worker_id, gateway_id, attempts, tokens_used,
    input_bytes, output_bytes, trace_id, mode, delivered, served_from, endpoint, cost_ms
FROM audit_staging
ON CONFLICT (id, created_at) DO UPDATE SET
    customer_id = coalesce(r.customer_id, excluded.customer_id),
    api_key_id = coalesce(r.api_key_id, excluded.api_key_id),
    tier = coalesce(r.tier, excluded.tier),
    model = coalesce(r.model, excluded.model),
    gateway_id = coalesce(r.gateway_id, excluded.gateway_id),
    input_bytes = coalesce(r.input_bytes, excluded.input_bytes),
    trace_id = coalesce(r.trace_id, excluded.trace_id),
    endpoint = coalesce(r.endpoint, excluded.endpoint),
    (status, error_code, http_status, completed_at, latency_ms, queue_ms, gpu_ms, batch_id, batch_size, worker_id,
     attempts, tokens_used, output_bytes, mode, delivered, served_from, cost_ms) = (
        SELECT e.status, e.error_code, e.http_status, e.completed_at, e.latency_ms, e.queue_ms, e.gpu_ms, e.batch_id,
               e.batch_size, e.worker_id, e.attempts, e.tokens_used, e.output_bytes, e.mode, e.delivered,
               e.served_from, e.cost_ms
        FROM (VALUES
            (true, excluded.status, excluded.error_code, excluded.http_status, excluded.completed_at,
             excluded.latency_ms, excluded.queue_ms, excluded.gpu_ms, excluded.batch_id, excluded.batch_size,
             excluded.worker_id, excluded.attempts, excluded.tokens_used, excluded.output_bytes, excluded.mode,
             excluded.delivered, excluded.served_from, excluded.cost_ms),
            (false, r.status, r.error_code, r.http_status, r.completed_at, r.latency_ms, r.queue_ms, r.gpu_ms,
             r.batch_id, r.batch_size, r.worker_id, r.attempts, r.tokens_used, r.output_bytes, r.mode, r.delivered,
             r.served_from, r.cost_ms)
        ) AS e (
            is_new, status, error_code, http_status, completed_at, latency_ms, queue_ms, gpu_ms, batch_id, batch_size,
            worker_id, attempts, tokens_used, output_bytes, mode, delivered, served_from, cost_ms
        )
        WHERE e.is_new = (excluded.status IN ('completed', 'failed') AND (
            r.status IN ('queued', 'processing')
            OR r.error_code IS NOT DISTINCT FROM 'abandoned'
            OR ((r.delivered IS NOT TRUE OR (r.status = 'completed' AND excluded.error_code = 'deadline_exceeded'))
                AND excluded.delivered IS TRUE AND (r.status, r.error_code) IS DISTINCT FROM (excluded.status, excluded.error_code))
        ))
    )
-- The same condition, or the accepted record of a row that has only an end. Other rows are not written.
WHERE (r.tier IS NULL AND excluded.tier IS NOT NULL)
   OR (excluded.status IN ('completed', 'failed') AND (
        r.status IN ('queued', 'processing')
        OR r.error_code IS NOT DISTINCT FROM 'abandoned'
        OR ((r.delivered IS NOT TRUE OR (r.status = 'completed' AND excluded.error_code = 'deadline_exceeded'))
            AND excluded.delivered IS TRUE AND (r.status, r.error_code) IS DISTINCT FROM (excluded.status, excluded.error_code))
    ))

-- name: find_request
SELECT id, created_at, customer_id::text, api_key_id, tier, model, status, error_code, http_status, completed_at,
       latency_ms, queue_ms, gpu_ms, batch_id, batch_size, worker_id, gateway_id, attempts, tokens_used, input_bytes,
       output_bytes, trace_id, mode, delivered, served_from, endpoint, cost_ms
FROM requests WHERE id = $1 AND created_at = $2
