-- $1 ids. Columns as in catalog_customers.
SELECT id::text, name, tier, status = 'suspended', requests_per_second, burst, max_concurrency, tokens_per_minute,
       max_queue_ms, callback_hosts
FROM customers WHERE id = ANY ($1::uuid[])
