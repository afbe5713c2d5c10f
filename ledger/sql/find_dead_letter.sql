SELECT l.request_id, l.dead_at, l.customer_id::text, c.name, l.tier, l.model, l.error_code, l.attempts, l.worker_ids,
       octet_length(l.body), l.requeued_as, l.requeued_at
FROM dead_letters AS l LEFT JOIN customers AS c ON c.id = l.customer_id
WHERE l.request_id = $1
