-- Jobs as arrays, one a column. An id that is there already is left as it is: an insert may be sent again.
INSERT INTO jobs (
    id, created_at, customer_id, api_key_id, tier, model, body, pool, deadline, trace_id, idempotency, fingerprint,
    callback_url
)
SELECT id, created_at, customer_id, api_key_id, tier, model, body, $13, clock_timestamp() + make_interval(secs => left_s),
       trace_id, idempotency, fingerprint, callback_url
FROM unnest(
    $1::text[], $2::timestamptz[], $3::uuid[], $4::text[], $5::text[], $6::text[], $7::bytea[], $8::float8[], $9::text[],
    $10::text[], $11::text[], $12::text[]
) AS j (
    id, created_at, customer_id, api_key_id, tier, model, body, left_s, trace_id, idempotency, fingerprint, callback_url
)
ON CONFLICT (id) DO NOTHING
