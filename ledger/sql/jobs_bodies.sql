-- All that is needed to queue these jobs again, where they are still open.
SELECT id, customer_id::text, api_key_id, tier, model, body, trace_id, idempotency, fingerprint,
       extract(epoch FROM deadline - clock_timestamp())::float8 AS left_s
FROM jobs WHERE id = ANY($1) AND status IN ('queued', 'processing')
