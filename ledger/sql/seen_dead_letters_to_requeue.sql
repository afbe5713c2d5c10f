-- $1 tier, $2 model, $3 error code (null: any; "": those of which it is not known), $4 newest number that was seen, $5 the
-- number after which to begin, $6 pools, $7 most. Those that can be run again as things are now, in their order.
SELECT l.id, l.request_id, m.pool
FROM dead_letters AS l
JOIN customers AS c ON c.id = l.customer_id
JOIN models AS m ON m.name = l.model
WHERE l.id <= $4 AND l.id > $5
  AND ($1::text IS NULL OR coalesce(l.tier, '') = $1)
  AND ($2::text IS NULL OR coalesce(l.model, '') = $2)
  AND ($3::text IS NULL OR l.error_code = $3)
  AND l.requeued_as IS NULL AND l.body IS NOT NULL AND c.status = 'active' AND m.enabled AND m.pool = ANY ($6)
ORDER BY l.id
LIMIT $7
