-- $1 pool, $2 and $3 the last job of the page before, $4 how many: the oldest open jobs after it.
SELECT id, created_at, tier, extract(epoch FROM deadline - clock_timestamp())::float8 AS left_s
FROM jobs
WHERE status IN ('queued', 'processing') AND pool = $1 AND (created_at, id) > ($2, $3)
ORDER BY created_at, id LIMIT $4
