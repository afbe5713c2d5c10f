-- Periodic work of the active auditor (ledger/audit/maintenance.py).

-- name: ensure_partitions
SELECT ensure_request_partitions($1)

-- name: close_abandoned
-- $1: seconds after which an open request is abandoned. $5: the same for jobs, whose gateway is $6. $2: row limit.
-- $3: error code. $4: HTTP status. $7: pool. The end of a request of another pool may wait in that pool's outbox, so its
-- row is not closed. Rows of a model that was deleted are closed by any pool. Uses the partial index on open rows.
UPDATE requests AS r
SET status = 'failed', error_code = $3, http_status = $4, completed_at = clock_timestamp()
FROM (
    SELECT id, created_at FROM requests
    WHERE status IN ('queued', 'processing') AND created_at < clock_timestamp() - make_interval(secs => $1)
      AND (gateway_id IS DISTINCT FROM $6 OR created_at < clock_timestamp() - make_interval(secs => $5))
      AND NOT EXISTS (SELECT FROM models AS m WHERE m.name = requests.model AND m.pool <> $7)
    ORDER BY created_at LIMIT $2
) AS overdue
WHERE r.id = overdue.id AND r.created_at = overdue.created_at AND r.status IN ('queued', 'processing')

-- name: delete_old_dead_letters
-- $1: days that dead letters are kept. $2: row limit.
DELETE FROM dead_letters WHERE id IN (
    SELECT id FROM dead_letters WHERE dead_at < now() - make_interval(days => $1) ORDER BY dead_at LIMIT $2
)

-- name: touch_keys
-- $1: key ids. $2: when each was last used. Writes no column that the triggers of the catalog watch.
UPDATE api_keys AS k SET last_used_at = used.at
FROM unnest($1::text[], $2::timestamptz[]) AS used (id, at)
WHERE k.id = used.id AND (k.last_used_at IS NULL OR k.last_used_at < used.at)
