-- Webhook secrets that customers rotate themselves (ledger/webhook_secrets.py).

-- name: webhook_secrets
-- $1: customer.
SELECT manages_keys, webhook_secret, webhook_secret_oldest, webhook_secret_until, clock_timestamp() AS now
FROM customers WHERE id = $1

-- name: lock_webhook_secrets
-- $1: customer. Concurrent rotations then wait for each other.
SELECT manages_keys, webhook_secret, webhook_secret_oldest, webhook_secret_until, clock_timestamp() AS now
FROM customers WHERE id = $1 AND status = 'active' FOR NO KEY UPDATE

-- name: set_webhook_secrets
UPDATE customers SET webhook_secret = $2, webhook_secret_oldest = $3, webhook_secret_until = $4 WHERE id = $1
