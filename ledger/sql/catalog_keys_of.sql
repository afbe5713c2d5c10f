-- $1 key ids, $2 ids of customers whose keys are all read. Columns as in catalog_keys.
SELECT id, customer_id::text, secret_hash, extract(epoch FROM expires_at)::double precision, revoked_at IS NOT NULL,
       requests_per_second, burst
FROM api_keys WHERE id = ANY ($1::text[]) OR customer_id = ANY ($2::uuid[])
