-- $1 request id, $2 pool. What its customer may have now, and whether its model is served there.
SELECT c.tier, c.status = 'active', coalesce(c.max_queue_ms, t.max_queue_ms),
       EXISTS (SELECT FROM models AS m WHERE m.name = l.model AND m.pool = $2 AND m.enabled)
FROM dead_letters AS l JOIN customers AS c ON c.id = l.customer_id JOIN tiers AS t ON t.name = c.tier
WHERE l.request_id = $1
