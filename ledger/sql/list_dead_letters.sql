-- $1 most rows, $2 name or id of a customer, $3 error code; null: any. Newest first; the body stays where it is.
SELECT l.request_id, l.dead_at, l.customer_id::text, c.name, l.tier, l.model, l.error_code, l.attempts, l.worker_ids,
       octet_length(l.body), l.requeued_as, l.requeued_at
FROM dead_letters AS l LEFT JOIN customers AS c ON c.id = l.customer_id
WHERE ($2::text IS NULL OR c.name = $2 OR l.customer_id::text = $2) AND ($3::text IS NULL OR l.error_code = $3)
ORDER BY l.dead_at DESC, l.id DESC LIMIT $1
