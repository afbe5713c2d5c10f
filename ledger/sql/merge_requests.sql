-- The staged rows meet what is there, in whichever order the two records of a request arrive: queued -> completed or
-- failed, once. What only the accepted record knows is filled in where it is missing. What only the ended record knows
-- is taken while the row is open, and never changed again, but for three cases: `abandoned` was only our guess, so any
-- end replaces it; an end that the gateway told its client replaces another one that nobody was told; and a 504 that it told
-- replaces a result that direct mode noted and then did not send (ledger/audit/rows.py says the same of two ends in one batch). So the same entries may be written any number of times.
INSERT INTO requests AS r (
    id, created_at, customer_id, api_key_id, tier, model, status, error_code, http_status, completed_at,
    latency_ms, queue_ms, gpu_ms, batch_id, batch_size, worker_id, gateway_id, attempts, tokens_used,
    input_bytes, output_bytes, trace_id, mode, delivered, served_from
)
SELECT
    id, created_at, customer_id, api_key_id, tier, model, status, error_code, http_status, completed_at,
    latency_ms, queue_ms, gpu_ms, batch_id, batch_size, worker_id, gateway_id, attempts, tokens_used,
    input_bytes, output_bytes, trace_id, mode, delivered, served_from
FROM audit_staging
ON CONFLICT (id, created_at) DO UPDATE SET
    customer_id = coalesce(r.customer_id, excluded.customer_id),
    api_key_id = coalesce(r.api_key_id, excluded.api_key_id),
    tier = coalesce(r.tier, excluded.tier),
    model = coalesce(r.model, excluded.model),
    gateway_id = coalesce(r.gateway_id, excluded.gateway_id),
    input_bytes = coalesce(r.input_bytes, excluded.input_bytes),
    trace_id = coalesce(r.trace_id, excluded.trace_id),
    (status, error_code, http_status, completed_at, latency_ms, queue_ms, gpu_ms, batch_id, batch_size, worker_id,
     attempts, tokens_used, output_bytes, mode, delivered, served_from) = (
        SELECT e.status, e.error_code, e.http_status, e.completed_at, e.latency_ms, e.queue_ms, e.gpu_ms, e.batch_id,
               e.batch_size, e.worker_id, e.attempts, e.tokens_used, e.output_bytes, e.mode, e.delivered,
               e.served_from
        FROM (VALUES
            (true, excluded.status, excluded.error_code, excluded.http_status, excluded.completed_at,
             excluded.latency_ms, excluded.queue_ms, excluded.gpu_ms, excluded.batch_id, excluded.batch_size,
             excluded.worker_id, excluded.attempts, excluded.tokens_used, excluded.output_bytes, excluded.mode,
             excluded.delivered, excluded.served_from),
            (false, r.status, r.error_code, r.http_status, r.completed_at, r.latency_ms, r.queue_ms, r.gpu_ms,
             r.batch_id, r.batch_size, r.worker_id, r.attempts, r.tokens_used, r.output_bytes, r.mode, r.delivered,
             r.served_from)
        ) AS e (
            is_new, status, error_code, http_status, completed_at, latency_ms, queue_ms, gpu_ms, batch_id, batch_size,
            worker_id, attempts, tokens_used, output_bytes, mode, delivered, served_from
        )
        WHERE e.is_new = (excluded.status IN ('completed', 'failed') AND (
            r.status IN ('queued', 'processing')
            OR r.error_code IS NOT DISTINCT FROM 'abandoned'
            OR ((r.delivered IS NOT TRUE OR (r.status = 'completed' AND excluded.error_code = 'deadline_exceeded'))
                AND excluded.delivered IS TRUE AND (r.status, r.error_code) IS DISTINCT FROM (excluded.status, excluded.error_code))
        ))
    )
-- The same condition again, or the beginning of what has only an end yet: else the row is left as it is.
WHERE (r.tier IS NULL AND excluded.tier IS NOT NULL)
   OR (excluded.status IN ('completed', 'failed') AND (
        r.status IN ('queued', 'processing')
        OR r.error_code IS NOT DISTINCT FROM 'abandoned'
        OR ((r.delivered IS NOT TRUE OR (r.status = 'completed' AND excluded.error_code = 'deadline_exceeded'))
            AND excluded.delivered IS TRUE AND (r.status, r.error_code) IS DISTINCT FROM (excluded.status, excluded.error_code))
    ))
