-- Revoked keys stay in: they are refused by name, like unknown ones, even while PostgreSQL is away.
SELECT id, customer_id::text, secret_hash, extract(epoch FROM expires_at)::double precision, revoked_at IS NOT NULL,
       requests_per_second, burst
FROM api_keys
