SELECT id, created_at, customer_id::text, api_key_id, tier, model, status, error_code, http_status, completed_at,
       latency_ms, queue_ms, gpu_ms, batch_id, batch_size, worker_id, gateway_id, attempts, tokens_used, input_bytes,
       output_bytes, trace_id, mode, delivered, served_from
FROM requests WHERE id = $1 AND created_at = $2
