-- Left to the reader: what a customer does not override, and whether its tier exists.
SELECT id::text, name, tier, status = 'suspended', :limits,
       max_queue_ms, callback_hosts
FROM customers
