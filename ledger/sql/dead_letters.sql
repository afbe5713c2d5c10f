-- Dead letters (ledger/dead_letters.py; the auditor inserts them).

-- name: insert_dead_letters
-- $1: request id. $2: when the request ended; null: now. $3: customer. $4: tier. $5: model. $6: error code. $7: attempts.
-- $8: workers. $9: body. An existing row is not changed, so the statement can be repeated.
INSERT INTO dead_letters (request_id, dead_at, customer_id, tier, model, error_code, attempts, worker_ids, body)
VALUES ($1, coalesce($2, now()), $3, $4, $5, $6, $7, $8, $9)
ON CONFLICT (request_id) DO NOTHING

-- name: list_dead_letters
-- $1: row limit. $2: name or id of a customer. $3: error code. Null: any. Newest first, without the bodies.
SELECT l.request_id, l.dead_at, l.customer_id::text, c.name, l.tier, l.model, l.error_code, l.attempts, l.worker_ids,
       octet_length(l.body), l.requeued_as, l.requeued_at
FROM dead_letters AS l LEFT JOIN customers AS c ON c.id = l.customer_id
WHERE ($2::text IS NULL OR c.name = $2 OR l.customer_id::text = $2) AND ($3::text IS NULL OR l.error_code = $3)
ORDER BY l.dead_at DESC, l.id DESC LIMIT $1

-- name: find_dead_letter
SELECT l.request_id, l.dead_at, l.customer_id::text, c.name, l.tier, l.model, l.error_code, l.attempts, l.worker_ids,
       octet_length(l.body), l.requeued_as, l.requeued_at
FROM dead_letters AS l LEFT JOIN customers AS c ON c.id = l.customer_id
WHERE l.request_id = $1

-- name: dead_letter_body
SELECT body FROM dead_letters WHERE request_id = $1

-- name: count_dead_letters
-- $1: ids. $2: minimum age in seconds. Null: any.
SELECT count(*) FROM dead_letters
WHERE ($1::text[] IS NULL OR request_id = ANY ($1))
  AND ($2::double precision IS NULL OR dead_at <= now() - make_interval(secs => $2))

-- name: purge_dead_letters
-- $1: ids. $2: minimum age in seconds. Null: any.
DELETE FROM dead_letters
WHERE ($1::text[] IS NULL OR request_id = ANY ($1))
  AND ($2::double precision IS NULL OR dead_at <= now() - make_interval(secs => $2))
RETURNING request_id

-- name: requeue_terms
-- $1: request id. $2: pool. The present tier, status and queue time of the customer, and whether the pool serves the model.
SELECT c.tier, c.status = 'active', coalesce(c.max_queue_ms, t.max_queue_ms),
       EXISTS (SELECT FROM models AS m WHERE m.name = l.model AND m.pool = $2 AND m.enabled)
FROM dead_letters AS l JOIN customers AS c ON c.id = l.customer_id JOIN tiers AS t ON t.name = c.tier
WHERE l.request_id = $1

-- name: mark_requeued
-- $1: request id. $2: id of the new request. $3: the present requeued_as. Of two concurrent callers, one updates no row.
UPDATE dead_letters SET requeued_as = $2, requeued_at = now()
WHERE request_id = $1 AND requeued_as IS NOT DISTINCT FROM $3

-- name: unmark_requeued
-- $1: request id. $2: id of the new request, which was rejected. $3, $4: the values before mark_requeued.
UPDATE dead_letters SET requeued_as = $3, requeued_at = $4 WHERE request_id = $1 AND requeued_as = $2

-- name: dead_letter_groups
-- $1: group limit. $2: pools. Groups by tier, model and error code ('' where unknown), the largest first: the count, how
-- many can be run again, the oldest, and the newest request. Each row also has the newest id, the total count, and
-- how many of all can be run again.
SELECT coalesce(l.tier, ''), coalesce(l.model, ''), l.error_code, count(*), count(*) FILTER (WHERE r.possible), min(l.dead_at),
       max(l.request_id),
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

-- name: purge_selected_dead_letters
-- $1: tier. $2: model. $3: error code. Null: any; '': unknown. $4: newest id. $5: row limit.
DELETE FROM dead_letters WHERE id IN (
    SELECT id FROM dead_letters
    WHERE id <= $4
      AND ($1::text IS NULL OR coalesce(tier, '') = $1)
      AND ($2::text IS NULL OR coalesce(model, '') = $2)
      AND ($3::text IS NULL OR error_code = $3)
    LIMIT $5
)
RETURNING request_id

-- name: requeueable_dead_letters
-- $1: tier. $2: model. $3: error code. Null: any; '': unknown. $4: newest id. $5: the last id of the previous page.
-- $6: pools. $7: row limit. Dead letters that can be run again now, in the order of their ids.
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

-- name: record_dead_letter_change
-- $1: the dead letters, described. $2: before. $3: after. Null: absent. The same columns as the triggers of the catalog write.
INSERT INTO config_changes (changed_by, table_name, row_key, old, new) VALUES (
    coalesce(nullif(current_setting('tierlane.actor', true), ''), session_user), 'dead_letters', $1, $2::jsonb, $3::jsonb
)
