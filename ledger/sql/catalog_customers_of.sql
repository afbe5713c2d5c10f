-- $1 ids. Columns as in catalog_customers.
SELECT id::text, name, tier, status = 'suspended', :limits,
       max_queue_ms, callback_hosts
FROM customers WHERE id = ANY ($1::uuid[])
