-- Stored responses of /v1/responses (ledger/responses.py). A row of 0 bytes is a response that was deleted: while it exists,
-- the replay of its request does not store it again.

-- name: insert_responses
-- One array for each column. $7: seconds that a response is stored. $8, $9: responses and bytes of one customer, over which
-- the oldest ones are deleted; deleted responses are counted by themselves. An existing id is not changed, so the statement
-- can be repeated. Rows that another statement is deleting are left to it.
WITH added AS (
    INSERT INTO responses (
        id, created_at, expires_at, customer_id, previous_id, document, input_items, bytes, open
    )
    SELECT id, created_at, clock_timestamp() + make_interval(secs => $7), customer_id, previous_id, document, input_items,
           octet_length(document) + octet_length(input_items), open
    FROM unnest($1::text[], $2::timestamptz[], $3::uuid[], $4::text[], $5::bytea[], $6::bytea[], $10::boolean[])
        AS r (id, created_at, customer_id, previous_id, document, input_items, open)
    ON CONFLICT (id) DO NOTHING
    RETURNING customer_id, bytes
), sizes AS (
    SELECT customer_id, count(*) AS count, sum(bytes) AS bytes FROM added GROUP BY customer_id
), before AS (
    SELECT r.id, (r.bytes > 0)::int * s.count + row_number() OVER newest AS count,
           (r.bytes > 0)::int * s.bytes + sum(r.bytes) OVER newest AS bytes
    FROM responses AS r JOIN sizes AS s USING (customer_id)
    WINDOW newest AS (PARTITION BY customer_id, r.bytes = 0 ORDER BY r.created_at DESC, r.id DESC)
), old AS (
    SELECT id FROM responses WHERE id IN (SELECT id FROM before WHERE count > $8 OR bytes > $9)
    ORDER BY id FOR UPDATE SKIP LOCKED
)
DELETE FROM responses WHERE id IN (SELECT id FROM old)

-- name: find_responses
-- `lost`: it is open, but its job was never stored, or a version before this table has ended it.
SELECT r.id, r.customer_id::text, r.document, r.input_items, r.open, r.output, r.error_code, r.finish_reason,
       r.tokens_used, r.output_tokens, r.open AND coalesce(j.status NOT IN ('queued', 'processing'), true) AS lost
FROM responses AS r LEFT JOIN jobs AS j ON r.open AND j.id = 'req_' || substr(r.id, 6)
WHERE r.id = ANY($1) AND r.expires_at > clock_timestamp()

-- name: running_responses
-- Those of the ids whose jobs have not ended.
SELECT r.id FROM responses AS r JOIN jobs AS j ON j.id = 'req_' || substr(r.id, 6)
WHERE r.id = ANY($1) AND r.open AND r.expires_at > clock_timestamp() AND j.status IN ('queued', 'processing')

-- name: find_conversation
-- $1: id. $2: customer. $3, $4: responses and bytes after which the search ends. The response and those before it, the
-- oldest first. Their content is only read if the search was not ended by a limit.
WITH RECURSIVE conversation AS (
    SELECT id, previous_id, 1 AS place, bytes::bigint AS bytes_so_far FROM responses
    WHERE id = $1 AND customer_id = $2 AND expires_at > clock_timestamp() AND bytes > 0
    UNION ALL
    SELECT r.id, r.previous_id, c.place + 1, c.bytes_so_far + r.bytes
    FROM conversation AS c JOIN responses AS r ON r.id = c.previous_id
    WHERE r.customer_id = $2 AND r.expires_at > clock_timestamp() AND r.bytes > 0 AND c.place < $3 AND c.bytes_so_far <= $4
), size AS (
    SELECT bool_or(bytes_so_far > $4 OR (place >= $3 AND previous_id IS NOT NULL)) AS too_long FROM conversation
)
SELECT c.id, r.customer_id::text, r.document, r.input_items, r.open, r.output, r.error_code, r.finish_reason, r.tokens_used,
       r.output_tokens, false AS lost, c.previous_id, s.too_long
FROM conversation AS c CROSS JOIN size AS s LEFT JOIN responses AS r ON r.id = c.id AND NOT s.too_long
ORDER BY c.place DESC

-- name: delete_response
UPDATE responses SET document = '', input_items = '', output = NULL, bytes = 0, open = false, previous_id = NULL
WHERE id = $1 AND customer_id = $2

-- name: purge_responses
-- $1: row limit. Deletes expired responses.
DELETE FROM responses WHERE id IN (
    SELECT id FROM responses WHERE expires_at <= clock_timestamp() ORDER BY expires_at LIMIT $1 FOR UPDATE SKIP LOCKED
)
