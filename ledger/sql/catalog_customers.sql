-- Left to the reader: what a customer does not override, and whether its tier exists.
SELECT id::text, name, tier, status = 'suspended', requests_per_second, burst, max_concurrency, tokens_per_minute,
       max_queue_ms, callback_hosts
FROM customers
