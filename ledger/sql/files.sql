-- Files of /v1/files (ledger/files.py). A file that has expired is not returned, even if its row was not deleted yet.

-- name: insert_file
-- It expires after an hour, unless its upload ends before.
INSERT INTO files (id, customer_id, purpose, filename, expires_at)
VALUES ($1, $2, 'batch', $3, clock_timestamp() + interval '1 hour')
ON CONFLICT (id) DO NOTHING

-- name: add_chunk
-- $1: file. $2: number of the chunk. $3: data. $4: bytes that its customer may store. Returns whether the chunk is stored, which
-- it may be from before: the statement can be repeated.
WITH stored AS (
    SELECT FROM file_chunks WHERE file_id = $1 AND number = $2
), allowed AS (
    UPDATE files AS f SET bytes = f.bytes + octet_length($3::bytea)
    WHERE id = $1 AND NOT complete AND NOT EXISTS (SELECT FROM stored) AND octet_length($3::bytea) + (
        SELECT sum(o.bytes) FROM files AS o WHERE o.customer_id = f.customer_id AND o.expires_at > clock_timestamp()
    ) <= $4
    RETURNING id
), added AS (
    INSERT INTO file_chunks (file_id, number, data) SELECT id, $2, $3::bytea FROM allowed RETURNING file_id
)
SELECT EXISTS (SELECT FROM stored) OR EXISTS (SELECT FROM added)

-- name: complete_file
-- $3: seconds from its creation until it expires.
UPDATE files SET complete = true, filename = $2, expires_at = created_at + make_interval(secs => $3)
WHERE id = $1
RETURNING id, customer_id::text, created_at, expires_at, purpose, filename, bytes, batch_id, of_errors

-- name: drop_file
-- An upload that failed.
UPDATE files SET expires_at = '-infinity', bytes = 0 WHERE id = $1 AND NOT complete

-- name: find_file
SELECT id, customer_id::text, created_at, expires_at, purpose, filename, bytes, batch_id, of_errors
FROM files WHERE id = $1 AND customer_id = $2 AND complete AND expires_at > clock_timestamp()

-- name: list_files
-- $1: customer. $2: id after which the page begins, or ''. $3: whether the oldest are first. $4: purpose, or ''. $5: limit.
SELECT id, customer_id::text, created_at, expires_at, purpose, filename, bytes, batch_id, of_errors
FROM files
WHERE customer_id = $1 AND complete AND expires_at > clock_timestamp() AND ($4 = '' OR purpose = $4)
  AND ($2 = '' OR CASE WHEN $3 THEN id > $2 ELSE id < $2 END)
ORDER BY CASE WHEN $3 THEN id END, CASE WHEN NOT $3 THEN id END DESC LIMIT $5

-- name: delete_file
-- Returns an open batch that reads the file; then it is not deleted. Its content is deleted later.
WITH reader AS (
    SELECT id FROM batches
    WHERE input_file_id = $1 AND status IN ('validating', 'in_progress', 'finalizing', 'cancelling') LIMIT 1
), deleted AS (
    UPDATE files SET expires_at = clock_timestamp()
    WHERE id = $1 AND customer_id = $2 AND complete AND expires_at > clock_timestamp()
      AND NOT EXISTS (SELECT FROM reader)
)
SELECT id FROM reader

-- name: read_chunk
SELECT data FROM file_chunks WHERE file_id = $1 AND number = $2

-- name: read_output
-- $1: batch. $2: whether its failed lines. $3: number of the last line of the page before. $4: bytes of the page, at least one
-- line. $5: line limit.
SELECT number, output FROM (
    SELECT number, output, sum(octet_length(output)) OVER (ORDER BY number) - octet_length(output) AS before
    FROM (
        SELECT number, output FROM batch_lines
        WHERE batch_id = $1 AND failed = $2 AND number > $3 ORDER BY number LIMIT $5
    ) AS page
) AS page
WHERE before < $4 ORDER BY number

-- name: purge_files
-- $1: limit of files, $2: of their chunks, $3: of the lines of batches. Deletes expired files that no open
-- batch reads, in parts: the row is deleted when no content is left.
WITH old AS (
    SELECT id, batch_id, of_errors FROM files
    WHERE expires_at <= clock_timestamp() AND NOT EXISTS (
        SELECT FROM batches AS b WHERE b.input_file_id = files.id
            AND b.status IN ('validating', 'in_progress', 'finalizing', 'cancelling')
    )
    ORDER BY expires_at LIMIT $1 FOR UPDATE SKIP LOCKED
), chunks AS (
    DELETE FROM file_chunks WHERE ctid = ANY (ARRAY(
        SELECT c.ctid FROM old JOIN file_chunks AS c ON c.file_id = old.id LIMIT $2
    )) RETURNING file_id
), lines AS (
    DELETE FROM batch_lines WHERE ctid = ANY (ARRAY(
        SELECT l.ctid FROM old JOIN batch_lines AS l ON l.batch_id = old.batch_id AND l.failed = old.of_errors LIMIT $3
    )) RETURNING batch_id
)
DELETE FROM files WHERE id IN (
    SELECT id FROM old WHERE NOT EXISTS (SELECT FROM chunks WHERE file_id = old.id)
        AND NOT EXISTS (SELECT FROM file_chunks WHERE file_id = old.id)
        AND NOT EXISTS (SELECT FROM batch_lines AS l WHERE l.batch_id = old.batch_id AND l.failed = old.of_errors)
)
