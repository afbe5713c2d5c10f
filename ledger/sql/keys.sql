-- API keys that customers manage themselves (ledger/keys.py).

-- name: manages_keys
-- $1: customer.
SELECT manages_keys FROM customers WHERE id = $1

-- name: lock_key_owner
-- $1: customer. Concurrent calls then count its keys one after the other. Rows that refer to the customer can be inserted meanwhile.
SELECT manages_keys FROM customers WHERE id = $1 AND status = 'active' FOR NO KEY UPDATE

-- name: key_rights
-- $1: customer. $2: the calling key. $3: the new key.
SELECT c.models AS customer_models, k.id, k.models, k.requests_per_second, k.burst, k.weight, k.expires_at, k.quotas,
       coalesce(k.quota_key, k.id) AS quota_key,
       clock_timestamp() AS now,
       (SELECT count(*) FROM api_keys AS o WHERE o.customer_id = c.id AND o.revoked_at IS NULL
          AND (o.expires_at IS NULL OR o.expires_at > clock_timestamp())) AS live,
       (SELECT count(*) FROM api_keys AS o WHERE o.customer_id = c.id
          AND o.created_at > clock_timestamp() - interval '24 hours') AS recent,
       EXISTS (SELECT FROM api_keys AS o WHERE o.customer_id = c.id AND o.id = $3) AS created
FROM customers AS c
LEFT JOIN api_keys AS k ON k.customer_id = c.id AND k.id = $2 AND k.revoked_at IS NULL
    AND (k.expires_at IS NULL OR k.expires_at > clock_timestamp())
WHERE c.id = $1

-- name: insert_key
INSERT INTO api_keys (id, customer_id, name, secret_hash, expires_at, requests_per_second, burst, weight, models, quotas, quota_key)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11)

-- name: list_keys
-- $1: customer. $2: only this key, null: all. $3: id after which the page begins, or ''. $4: row limit. The newest first.
SELECT id, name, created_at, expires_at, revoked_at, last_used_at, requests_per_second, burst, models, quotas
FROM api_keys
WHERE customer_id = $1 AND ($2::text IS NULL OR id = $2)
  AND ($3 = '' OR (created_at, id) < (SELECT created_at, id FROM api_keys WHERE customer_id = $1 AND id = $3))
ORDER BY created_at DESC, id DESC LIMIT $4

-- name: revoke_key
-- $1: customer. $2: key. A key that is revoked already keeps its time.
UPDATE api_keys SET revoked_at = clock_timestamp() WHERE customer_id = $1 AND id = $2 AND revoked_at IS NULL
