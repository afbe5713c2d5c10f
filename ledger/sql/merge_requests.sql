-- The staged rows meet what is there, in whichever order the two records of a request arrive: queued -> completed or
-- failed, once. What only the accepted record knows is filled in where it is missing; what only the ended record knows
-- is written while the row is open, and never changed again (an `abandoned` was only our guess, so a real end replaces
-- it). So the same entries may be written any number of times.
INSERT INTO requests AS r (
    id, created_at, customer_id, api_key_id, tier, model, status, error_code, http_status, completed_at,
    latency_ms, queue_ms, gpu_ms, batch_id, batch_size, worker_id, gateway_id, attempts, tokens_used,
    input_bytes, output_bytes, trace_id
)
SELECT
    id, created_at, customer_id, api_key_id, tier, model, status, error_code, http_status, completed_at,
    latency_ms, queue_ms, gpu_ms, batch_id, batch_size, worker_id, gateway_id, attempts, tokens_used,
    input_bytes, output_bytes, trace_id
FROM audit_staging
ON CONFLICT (id, created_at) DO UPDATE SET
    customer_id = coalesce(r.customer_id, excluded.customer_id),
    api_key_id = coalesce(r.api_key_id, excluded.api_key_id),
    tier = coalesce(r.tier, excluded.tier),
    model = coalesce(r.model, excluded.model),
    gateway_id = coalesce(r.gateway_id, excluded.gateway_id),
    input_bytes = coalesce(r.input_bytes, excluded.input_bytes),
    trace_id = coalesce(r.trace_id, excluded.trace_id),
    status = CASE WHEN r.status IN ('completed', 'failed') AND r.error_code IS DISTINCT FROM 'abandoned' THEN r.status ELSE excluded.status END,
    error_code = CASE WHEN r.status IN ('completed', 'failed') AND r.error_code IS DISTINCT FROM 'abandoned' THEN r.error_code ELSE excluded.error_code END,
    http_status = CASE WHEN r.status IN ('completed', 'failed') AND r.error_code IS DISTINCT FROM 'abandoned' THEN r.http_status ELSE excluded.http_status END,
    completed_at = CASE WHEN r.status IN ('completed', 'failed') AND r.error_code IS DISTINCT FROM 'abandoned' THEN r.completed_at ELSE excluded.completed_at END,
    latency_ms = CASE WHEN r.status IN ('completed', 'failed') AND r.error_code IS DISTINCT FROM 'abandoned' THEN r.latency_ms ELSE excluded.latency_ms END,
    queue_ms = CASE WHEN r.status IN ('completed', 'failed') AND r.error_code IS DISTINCT FROM 'abandoned' THEN r.queue_ms ELSE excluded.queue_ms END,
    gpu_ms = CASE WHEN r.status IN ('completed', 'failed') AND r.error_code IS DISTINCT FROM 'abandoned' THEN r.gpu_ms ELSE excluded.gpu_ms END,
    batch_id = CASE WHEN r.status IN ('completed', 'failed') AND r.error_code IS DISTINCT FROM 'abandoned' THEN r.batch_id ELSE excluded.batch_id END,
    batch_size = CASE WHEN r.status IN ('completed', 'failed') AND r.error_code IS DISTINCT FROM 'abandoned' THEN r.batch_size ELSE excluded.batch_size END,
    worker_id = CASE WHEN r.status IN ('completed', 'failed') AND r.error_code IS DISTINCT FROM 'abandoned' THEN r.worker_id ELSE excluded.worker_id END,
    attempts = CASE WHEN r.status IN ('completed', 'failed') AND r.error_code IS DISTINCT FROM 'abandoned' THEN r.attempts ELSE excluded.attempts END,
    tokens_used = CASE WHEN r.status IN ('completed', 'failed') AND r.error_code IS DISTINCT FROM 'abandoned' THEN r.tokens_used ELSE excluded.tokens_used END,
    output_bytes = CASE WHEN r.status IN ('completed', 'failed') AND r.error_code IS DISTINCT FROM 'abandoned' THEN r.output_bytes ELSE excluded.output_bytes END
WHERE (NOT (r.status IN ('completed', 'failed') AND r.error_code IS DISTINCT FROM 'abandoned') AND excluded.status IN ('completed', 'failed'))
   OR (r.tier IS NULL AND excluded.tier IS NOT NULL)
