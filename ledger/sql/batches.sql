-- Batches of /v1/batches (ledger/batches.py).

-- name: insert_batch
-- $9, $10: hashes of the Idempotency-Key and of the body. $11: seconds until its open lines expire. $12: open batches that its
-- customer may have. Returns the batch and the hash of its body: an earlier one with this key, else the new one. No row if the
-- customer has too many, or if the same key is just being inserted. An existing id is not changed, so the statement can be
-- repeated.
WITH known AS (
    SELECT id, fingerprint FROM batches WHERE id = $1 OR (customer_id = $2 AND idempotency = $9)
), added AS (
    INSERT INTO batches (
        id, customer_id, api_key_id, endpoint, input_file_id, metadata, output_kept_s, pool, idempotency, fingerprint, deadline
    )
    SELECT $1, $2, $3, $4, $5, $6, $7, $8, $9, $10, clock_timestamp() + make_interval(secs => $11)
    WHERE NOT EXISTS (SELECT FROM known) AND $12 > (
        SELECT count(*) FROM batches
        WHERE customer_id = $2 AND status IN ('validating', 'in_progress', 'finalizing', 'cancelling')
    )
    ON CONFLICT DO NOTHING
    RETURNING id, fingerprint
)
SELECT id, fingerprint FROM known UNION ALL SELECT id, fingerprint FROM added

-- name: find_batch
-- $2: customer, null for all.
SELECT b.*, (extract(epoch FROM deadline - clock_timestamp()))::float8 AS left_s, c.name AS customer
FROM batches AS b JOIN customers AS c ON c.id = b.customer_id
WHERE b.id = $1 AND ($2::uuid IS NULL OR customer_id = $2)

-- name: list_batches
-- $1: customer, null for all. $2: id after which the page begins, or ''. $3: limit. $4: whether open ones only. $5: name or id of a
-- customer, null for all. The newest first.
SELECT b.*, (extract(epoch FROM deadline - clock_timestamp()))::float8 AS left_s, c.name AS customer
FROM batches AS b JOIN customers AS c ON c.id = b.customer_id
WHERE ($1::uuid IS NULL OR customer_id = $1) AND ($2 = '' OR b.id < $2)
  AND ($5::text IS NULL OR c.name = $5 OR c.id::text = $5)
  AND (NOT $4 OR b.status IN ('validating', 'in_progress', 'finalizing', 'cancelling'))
ORDER BY b.id DESC LIMIT $3

-- name: cancel_batch
-- $2: customer, null for all. Returns whether it was cancelled by this statement.
UPDATE batches SET status = 'cancelling', cancelling_at = clock_timestamp()
WHERE id = $1 AND ($2::uuid IS NULL OR customer_id = $2) AND status IN ('validating', 'in_progress')
RETURNING id

-- name: claim_batches
-- $1: owner. $2: seconds of its lease. $3: limit. $4: batches of one customer that are run at a time, by all owners. $5: only
-- those of this pool, null for all. The oldest batch of each customer first. No lease ends before its owner could renew it after
-- a restart of PostgreSQL.
WITH unfinished AS (
    SELECT id, customer_id, created_at, owned_until IS NOT NULL
        AND greatest(owned_until, pg_postmaster_start_time() + make_interval(secs => $2)) > clock_timestamp() AS owned
    FROM batches
    WHERE status IN ('validating', 'in_progress', 'finalizing', 'cancelling') AND ($5::text IS NULL OR pool = $5)
), ranked AS (
    SELECT id, created_at, owned,
           row_number() OVER (PARTITION BY customer_id ORDER BY owned DESC, created_at, id) AS rank
    FROM unfinished
), free AS (
    SELECT id FROM batches WHERE id IN (SELECT id FROM ranked WHERE NOT owned AND rank <= $4 ORDER BY rank, created_at LIMIT $3)
      AND (owned_until > clock_timestamp()) IS NOT TRUE
    FOR UPDATE SKIP LOCKED
)
UPDATE batches AS b SET owner = $1, owned_until = clock_timestamp() + make_interval(secs => $2)
FROM free, customers AS c WHERE b.id = free.id AND c.id = b.customer_id
RETURNING b.*, (extract(epoch FROM deadline - clock_timestamp()))::float8 AS left_s, c.name AS customer

-- name: renew_batches
-- $1: owner. $2: seconds of its lease. $3: ids. Returns those that it still owns.
UPDATE batches SET owned_until = clock_timestamp() + make_interval(secs => $2)
WHERE id = ANY($3) AND owner = $1 AND status IN ('validating', 'in_progress', 'finalizing', 'cancelling')
RETURNING id, status

-- name: release_batches
UPDATE batches SET owned_until = NULL, owner = NULL
WHERE owner = $1 AND status IN ('validating', 'in_progress', 'finalizing', 'cancelling')

-- name: count_open_batches
-- Lines are counted from when the file was checked.
SELECT count(*) AS batches, coalesce(sum(total - completed - failed), 0)::bigint AS lines
FROM batches WHERE status IN ('validating', 'in_progress', 'finalizing', 'cancelling')

-- name: start_batch
-- $2: lines. The input file is valid. Returns the status, which may be `cancelling`.
UPDATE batches SET total = $2,
    in_progress_at = CASE WHEN status = 'validating' THEN clock_timestamp() ELSE in_progress_at END,
    status = CASE WHEN status = 'validating' THEN 'in_progress' ELSE status END
WHERE id = $1 AND status IN ('validating', 'in_progress', 'cancelling')
RETURNING status

-- name: fail_batch
-- $2: faults of the input file. $3: seconds that the batch is kept.
UPDATE batches SET status = 'failed', failed_at = clock_timestamp(), errors = $2, owner = NULL,
    expires_at = clock_timestamp() + make_interval(secs => $3)
WHERE id = $1 AND status IN ('validating', 'cancelling')

-- name: known_lines
-- $2, $3: numbers of the first and the last line.
SELECT number, request_id, output IS NOT NULL AS ended FROM batch_lines WHERE batch_id = $1 AND number BETWEEN $2 AND $3

-- name: begin_lines
-- One array for each column; `before`: the id that the new one replaces, '' for none. Stores the requests of lines before they
-- are submitted. Returns the request of each line: that of another owner, if it was there first. A line that has ended, or
-- whose id is not `before` any more, is not returned.
WITH new AS (
    SELECT number, before, request_id FROM unnest($2::int[], $3::text[], $4::text[]) AS n (number, before, request_id)
), added AS (
    INSERT INTO batch_lines AS l (batch_id, number, request_id) SELECT $1, number, request_id FROM new WHERE before = ''
    ON CONFLICT (batch_id, number) DO UPDATE SET request_id = l.request_id WHERE l.output IS NULL
    RETURNING number, request_id
), changed AS (
    UPDATE batch_lines AS l SET request_id = n.request_id
    FROM new AS n WHERE l.batch_id = $1 AND l.number = n.number AND l.request_id = n.before AND l.output IS NULL
    RETURNING l.number, l.request_id
)
SELECT number, request_id FROM added UNION ALL SELECT number, request_id FROM changed

-- name: end_lines
-- One array for each column. Each line ends once, and is counted once: the statement can be repeated. Returns the batch's
-- status; no row if it was deleted.
WITH ended AS (
    INSERT INTO batch_lines AS l (batch_id, number, request_id, output, failed)
    SELECT $1, number, request_id, output, failed
    FROM unnest($2::int[], $3::text[], $4::bytea[], $5::boolean[]) AS n (number, request_id, output, failed)
    ON CONFLICT (batch_id, number) DO UPDATE SET output = excluded.output, failed = excluded.failed
    WHERE l.output IS NULL
    RETURNING failed, octet_length(output) + 1 AS size
), counts AS (
    SELECT count(*) FILTER (WHERE NOT failed) AS completed, count(*) FILTER (WHERE failed) AS failed,
           coalesce(sum(size) FILTER (WHERE NOT failed), 0) AS output_bytes,
           coalesce(sum(size) FILTER (WHERE failed), 0) AS error_bytes
    FROM ended
)
UPDATE batches AS b SET completed = b.completed + c.completed, failed = b.failed + c.failed,
    output_bytes = b.output_bytes + c.output_bytes, error_bytes = b.error_bytes + c.error_bytes
FROM counts AS c WHERE id = $1
RETURNING b.status

-- name: end_batch
-- $2: the final status. $3, $4: ids of the output and the error file. $5: seconds that they are kept. Without responses there is no
-- output file, without errors no error file. Returns the final status.
WITH ended AS (
    UPDATE batches SET
        status = CASE WHEN status = 'cancelling' THEN 'cancelled' ELSE $2 END,
        finalizing_at = coalesce(finalizing_at, clock_timestamp()), audit_after = 0,
        completed_at = CASE WHEN status <> 'cancelling' AND $2 = 'completed' THEN clock_timestamp() END,
        expired_at = CASE WHEN status <> 'cancelling' AND $2 = 'expired' THEN clock_timestamp() END,
        cancelled_at = CASE WHEN status = 'cancelling' THEN clock_timestamp() END,
        output_file_id = CASE WHEN completed > 0 THEN $3 END, error_file_id = CASE WHEN failed > 0 THEN $4 END,
        expires_at = clock_timestamp() + make_interval(secs => coalesce(output_kept_s, $5::float8)), owner = NULL
    WHERE id = $1 AND status IN ('validating', 'in_progress', 'finalizing', 'cancelling')
    RETURNING *
), stored AS (
    INSERT INTO files (id, customer_id, purpose, filename, bytes, complete, batch_id, of_errors, expires_at)
    SELECT output_file_id, customer_id, 'batch_output', id || '_output.jsonl', output_bytes, true, id, false, expires_at
    FROM ended WHERE output_file_id IS NOT NULL
    UNION ALL
    SELECT error_file_id, customer_id, 'batch_output', id || '_error.jsonl', error_bytes, true, id, true, expires_at
    FROM ended WHERE error_file_id IS NOT NULL
    ON CONFLICT (id) DO NOTHING
)
SELECT status FROM ended

-- name: audit_lines
-- $1: seconds since the end of a batch. $2: line limit. $3: the HTTP status of each error code. Writes the audit rows of lines that
-- ended while Redis, and with it the auditor's entries, was lost, and the gateway too, which had kept them. A line without
-- any row is one that ran only if it completed. The time of its end is that of the batch, since its own is not stored. Values
-- are found by patterns, which cannot occur in a string of the JSON; its functions raise an error for \u0000.
WITH batch AS (
    SELECT b.id, b.customer_id, b.api_key_id, b.endpoint, b.audit_after, b.finalizing_at, c.tier
    FROM batches AS b JOIN customers AS c ON c.id = b.customer_id
    WHERE audit_after IS NOT NULL AND finalizing_at < clock_timestamp() - make_interval(secs => $1)
    ORDER BY finalizing_at LIMIT 1 FOR UPDATE OF b SKIP LOCKED
), lines AS (
    SELECT b.*, l.number, l.request_id, l.failed, l.output,
           timestamptz 'epoch' + ('x' || substr(l.request_id, 5, 12))::bit(48)::bigint * interval '1 ms' AS created_at
    FROM batch AS b JOIN batch_lines AS l ON l.batch_id = b.id AND l.number > b.audit_after
    WHERE l.output IS NOT NULL ORDER BY l.number LIMIT $2
), unaudited AS (
    SELECT l.*, convert_from(l.output, 'UTF8') AS text
    FROM lines AS l LEFT JOIN requests AS r ON r.id = l.request_id AND r.created_at = l.created_at
    WHERE CASE WHEN r.id IS NULL THEN NOT l.failed
        ELSE r.status IN ('queued', 'processing') OR r.error_code IS NOT DISTINCT FROM 'abandoned' END
), ended AS (
    SELECT *, CASE WHEN failed THEN coalesce(substring(text FROM '"code":"([a-z_]+)","request_id"'), 'cancelled') END AS code
    FROM unaudited
), written AS (
    INSERT INTO requests AS r (
        id, created_at, customer_id, api_key_id, tier, model, status, error_code, http_status, completed_at, latency_ms,
        gateway_id, tokens_used, mode, endpoint
    )
    SELECT request_id, created_at, customer_id, api_key_id, tier, substring(text FROM '"model":"([^"\\]+)"'),
           CASE WHEN code IS NULL THEN 'completed' ELSE 'failed' END, code,
           CASE WHEN code IS NULL THEN 200 ELSE coalesce(($3::jsonb ->> code)::smallint, 500) END, finalizing_at,
           greatest(0, extract(epoch FROM finalizing_at - created_at) * 1000), 'jobs',
           substring(text FROM '"total_tokens":(\d{1,9})')::int, 'queue', endpoint
    FROM ended
    ON CONFLICT (id, created_at) DO UPDATE SET
        status = excluded.status, error_code = excluded.error_code, http_status = excluded.http_status,
        completed_at = excluded.completed_at, latency_ms = excluded.latency_ms, tokens_used = excluded.tokens_used,
        mode = excluded.mode
    WHERE r.status IN ('queued', 'processing') OR r.error_code IS NOT DISTINCT FROM 'abandoned'
    RETURNING r.id
), marked AS (
    UPDATE batches AS b SET audit_after = CASE WHEN (SELECT count(*) FROM lines) = $2 THEN (SELECT max(number) FROM lines) END
    FROM batch WHERE b.id = batch.id
)
SELECT (SELECT count(*) FROM batch), (SELECT count(*) FROM written)

-- name: finalize_batch
UPDATE batches SET status = 'finalizing', finalizing_at = clock_timestamp() WHERE id = $1 AND status = 'in_progress'

-- name: purge_batches
-- $1: limit of batches, $2: of lines. Deletes expired batches, in parts: the row is deleted when no line is left.
WITH old AS (
    SELECT id FROM batches WHERE expires_at <= clock_timestamp() ORDER BY expires_at LIMIT $1 FOR UPDATE SKIP LOCKED
), lines AS (
    DELETE FROM batch_lines WHERE ctid = ANY (ARRAY(
        SELECT l.ctid FROM old JOIN batch_lines AS l ON l.batch_id = old.id LIMIT $2
    ))
)
DELETE FROM batches WHERE id IN (
    SELECT id FROM old WHERE NOT EXISTS (SELECT FROM batch_lines AS l WHERE l.batch_id = old.id)
)
