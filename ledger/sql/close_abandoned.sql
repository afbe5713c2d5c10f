-- $1 seconds after which an open row has no chance left, $5 the same of a job ($6 is the gateway that jobs are told to have),
-- $2 most rows to close now. Open rows are in a partial index. $7 the pool: an end that waits in another one's outbox is not
-- known here. Rows of a model that is gone are anybody's.
UPDATE requests AS r
SET status = 'failed', error_code = $3, http_status = $4, completed_at = clock_timestamp()
FROM (
    SELECT id, created_at FROM requests
    WHERE status IN ('queued', 'processing') AND created_at < clock_timestamp() - make_interval(secs => $1)
      AND (gateway_id IS DISTINCT FROM $6 OR created_at < clock_timestamp() - make_interval(secs => $5))
      AND NOT EXISTS (SELECT FROM models AS m WHERE m.name = requests.model AND m.pool <> $7)
    ORDER BY created_at LIMIT $2
) AS late
WHERE r.id = late.id AND r.created_at = late.created_at AND r.status IN ('queued', 'processing')
