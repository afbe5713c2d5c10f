-- $1 most groups, $2 pools. By tier, model and cause ("" where not known), the largest first: how many, how many of them can
-- be run again, the oldest; and in every row the newest number, how many there are, how many can be run again in all.
SELECT coalesce(l.tier, ''), coalesce(l.model, ''), l.error_code, count(*), count(*) FILTER (WHERE r.possible), min(l.dead_at),
       max(max(l.id)) OVER (), (sum(count(*)) OVER ())::bigint, (sum(count(*) FILTER (WHERE r.possible)) OVER ())::bigint
FROM dead_letters AS l
LEFT JOIN customers AS c ON c.id = l.customer_id
LEFT JOIN models AS m ON m.name = l.model
CROSS JOIN LATERAL (
    SELECT coalesce(l.requeued_as IS NULL AND l.body IS NOT NULL AND c.status = 'active' AND m.enabled AND m.pool = ANY ($2), false)
) AS r (possible)
GROUP BY 1, 2, 3
ORDER BY 4 DESC, 1, 2, 3
LIMIT $1
