-- $1 pool, $2 seconds since the end, $3 most rows, $4 the HTTP status of each error code: the audit of jobs that ended
-- while Redis, and with it the auditor's entries, was lost. A terminal row stands, but for `abandoned`, which was a guess.
WITH late AS (
    SELECT * FROM jobs
    WHERE completed_at < clock_timestamp() - make_interval(secs => $2) AND NOT audited AND pool = $1
    ORDER BY completed_at LIMIT $3
), written AS (
    INSERT INTO requests AS r (
        id, created_at, customer_id, api_key_id, tier, model, status, error_code, http_status, completed_at, latency_ms,
        gateway_id, tokens_used, input_bytes, output_bytes, trace_id, mode
    )
    SELECT id, created_at, customer_id, api_key_id, tier, model, status, error_code,
           CASE WHEN error_code IS NULL THEN 200 ELSE coalesce(($4::jsonb ->> error_code)::smallint, 500) END, completed_at,
           greatest(0, extract(epoch FROM completed_at - created_at) * 1000), 'jobs', tokens_used, NULL,
           CASE WHEN error_code IS NULL THEN octet_length(output) END, trace_id, 'queue'
    FROM late
    ON CONFLICT (id, created_at) DO UPDATE SET
        status = excluded.status, error_code = excluded.error_code, http_status = excluded.http_status,
        completed_at = excluded.completed_at, latency_ms = excluded.latency_ms, tokens_used = excluded.tokens_used,
        output_bytes = excluded.output_bytes, mode = excluded.mode
    WHERE r.status IN ('queued', 'processing') OR r.error_code IS NOT DISTINCT FROM 'abandoned'
    RETURNING r.id
), noted AS (
    UPDATE jobs SET audited = true FROM late WHERE jobs.id = late.id
)
SELECT count(*) FROM written
