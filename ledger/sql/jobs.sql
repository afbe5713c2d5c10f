-- Asynchronous jobs (ledger/jobs.py).

-- name: insert_jobs
-- One array for each column. An existing id is not changed, so the statement can be repeated.
INSERT INTO jobs (
    id, created_at, customer_id, api_key_id, tier, model, body, pool, deadline, trace_id, idempotency, fingerprint,
    callback_url, endpoint, interactive
)
SELECT id, created_at, customer_id, api_key_id, tier, model, body, $15, clock_timestamp() + make_interval(secs => left_s),
       trace_id, idempotency, fingerprint, callback_url, endpoint, interactive
FROM unnest(
    $1::text[], $2::timestamptz[], $3::uuid[], $4::text[], $5::text[], $6::text[], $7::bytea[], $8::float8[], $9::text[],
    $10::text[], $11::text[], $12::text[], $13::text[], $14::bool[]
) AS j (
    id, created_at, customer_id, api_key_id, tier, model, body, left_s, trace_id, idempotency, fingerprint, callback_url,
    endpoint, interactive
)
ON CONFLICT (id) DO NOTHING

-- name: find_jobs
-- An expired job is not returned, even if its row was not deleted yet.
SELECT id, customer_id::text, status, output, error_code, pool, tokens_used,
       (extract(epoch FROM completed_at - created_at) * 1000)::float8 AS latency_ms, model, tier
FROM jobs WHERE id = ANY($1) AND (expires_at IS NULL OR expires_at > clock_timestamp())

-- name: list_jobs
-- $1: customer. $2: id after which the page begins, or ''. $3: row limit. The newest first; ids begin with the time.
SELECT id, status, model, tier, created_at, completed_at, expires_at, tokens_used, error_code,
       callback_url IS NOT NULL AS has_callback, callback_tries, callback_at, callback_status
FROM jobs
WHERE customer_id = $1 AND ($2 = '' OR id < $2) AND (expires_at IS NULL OR expires_at > clock_timestamp())
ORDER BY id DESC LIMIT $3

-- name: open_jobs
-- $1: pool. $2, $3: creation time and id of the last job of the previous page. $4: row limit. The oldest open jobs after it.
SELECT id, created_at, tier, extract(epoch FROM deadline - clock_timestamp())::float8 AS left_s
FROM jobs
WHERE status IN ('queued', 'processing') AND pool = $1 AND (created_at, id) > ($2, $3)
ORDER BY created_at, id LIMIT $4

-- name: open_job_bodies
-- The data that is needed to queue these jobs again. Jobs that have ended are not returned.
SELECT id, customer_id::text, api_key_id, tier, model, body, trace_id, idempotency, fingerprint, endpoint, interactive,
       extract(epoch FROM deadline - clock_timestamp())::float8 AS left_s
FROM jobs WHERE id = ANY($1) AND status IN ('queued', 'processing')

-- name: count_requeue
UPDATE jobs SET attempts = attempts + 1 WHERE id = ANY($1) AND status IN ('queued', 'processing')

-- name: job_pools
-- The pools with jobs that are open, or have to be called back, audited or deleted. Each part has an index.
SELECT pool FROM jobs WHERE status IN ('queued', 'processing')
UNION SELECT pool FROM jobs WHERE callback_at IS NOT NULL
UNION SELECT pool FROM jobs WHERE completed_at IS NOT NULL AND NOT audited
UNION SELECT pool FROM jobs WHERE expires_at <= clock_timestamp()

-- name: count_open_jobs
-- $1: cell.
SELECT count(*) FROM jobs WHERE status IN ('queued', 'processing') AND split_part(pool, '@', 2) = $1

-- name: move_jobs
-- $1: cell. $2: the end of the name of another place: '' in the default cell. All jobs of the cell, also those that have ended:
-- they have to be called back, audited and deleted.
UPDATE jobs SET pool = split_part(pool, '@', 1) || $2 WHERE split_part(pool, '@', 2) = $1

-- name: end_jobs
-- One array for each column. $9: seconds that the result is kept. Ends each job once: queued or processing -> completed or
-- failed. A job of another customer than the end's is not changed. The end of a background response is stored with it, in
-- the same statement. Returns the jobs that this statement ended.
WITH e AS (
    SELECT * FROM unnest(
        $1::text[], $2::text[], $3::text[], $4::bytea[], $5::text[], $6::int[], $7::int[], $8::text[]
    ) AS e (id, customer_id, status, output, error_code, tokens_used, output_tokens, finish_reason)
), ended AS (
    UPDATE jobs AS j
    SET status = e.status, output = e.output, error_code = e.error_code, tokens_used = e.tokens_used,
        completed_at = clock_timestamp(), expires_at = clock_timestamp() + make_interval(secs => $9),
        callback_at = CASE WHEN j.callback_url IS NOT NULL THEN clock_timestamp() END
    FROM e
    WHERE j.id = e.id AND (e.customer_id = '' OR j.customer_id::text = e.customer_id)
      AND j.status IN ('queued', 'processing')
    RETURNING j.id
), stored AS (
    UPDATE responses AS r
    SET open = false, output = e.output, error_code = e.error_code, tokens_used = e.tokens_used,
        output_tokens = e.output_tokens, finish_reason = e.finish_reason,
        bytes = r.bytes + coalesce(octet_length(e.output), 0)
    FROM e JOIN ended USING (id)
    WHERE r.id = 'resp_' || substr(e.id, 5) AND r.open
)
SELECT id FROM ended

-- name: audit_jobs
-- $1: pool. $2: seconds since the end. $3: row limit. $4: the HTTP status of each error code. Writes the audit rows of jobs
-- that ended while Redis, and with it the auditor's entries, was lost. A final row is changed only if it is `abandoned`,
-- which was assumed.
WITH unaudited AS (
    SELECT * FROM jobs
    WHERE completed_at < clock_timestamp() - make_interval(secs => $2) AND NOT audited AND pool = $1
    ORDER BY completed_at LIMIT $3
), written AS (
    INSERT INTO requests AS r (
        id, created_at, customer_id, api_key_id, tier, model, status, error_code, http_status, completed_at, latency_ms,
        gateway_id, tokens_used, input_bytes, output_bytes, trace_id, mode, endpoint
    )
    SELECT id, created_at, customer_id, api_key_id, tier, model, status, error_code,
           CASE WHEN error_code IS NULL THEN 200 ELSE coalesce(($4::jsonb ->> error_code)::smallint, 500) END, completed_at,
           greatest(0, extract(epoch FROM completed_at - created_at) * 1000), 'jobs', tokens_used, NULL,
           CASE WHEN error_code IS NULL THEN octet_length(output) END, trace_id, 'queue', endpoint
    FROM unaudited
    ON CONFLICT (id, created_at) DO UPDATE SET
        status = excluded.status, error_code = excluded.error_code, http_status = excluded.http_status,
        completed_at = excluded.completed_at, latency_ms = excluded.latency_ms, tokens_used = excluded.tokens_used,
        output_bytes = excluded.output_bytes, mode = excluded.mode
    WHERE r.status IN ('queued', 'processing') OR r.error_code IS NOT DISTINCT FROM 'abandoned'
    RETURNING r.id
), marked AS (
    UPDATE jobs SET audited = true FROM unaudited WHERE jobs.id = unaudited.id
)
SELECT count(*) FROM written

-- name: purge_jobs
-- $1: pool. $2: row limit. Deletes expired jobs that are audited.
DELETE FROM jobs WHERE id IN (
    SELECT id FROM jobs WHERE expires_at <= clock_timestamp() AND audited AND pool = $1 ORDER BY expires_at LIMIT $2
)

-- name: due_callbacks
-- $1: pool. $2: row limit. $3: limit for each host. $4: jobs whose callbacks are being sent. $5: limit for each customer.
-- $6: paused hosts of customers, as `customer host`. Callbacks that are due, those with the fewest attempts first. The
-- limits for hosts and customers are those of concurrent calls, so that a host with many due callbacks does not hide others.
SELECT due.id, customer_id::text, host, callback_url, callback_tries,
       extract(epoch FROM expires_at - clock_timestamp())::float8 AS left_s,
       webhook_secret, webhook_secret_oldest, webhook_secret_until, clock_timestamp() AS now
FROM (
    SELECT *, row_number() OVER (PARTITION BY customer_id ORDER BY callback_tries, callback_at) AS customer_rank
    FROM (
        SELECT *, row_number() OVER (PARTITION BY host ORDER BY callback_tries, callback_at) AS host_rank
        FROM (
            SELECT id, customer_id, callback_url, callback_tries, callback_at, expires_at,
                   coalesce(lower(substring(callback_url FROM '://([^/?:[]*|\[[^]]*])')), '') AS host
            FROM jobs WHERE callback_at <= clock_timestamp() AND pool = $1 AND id <> ALL($4)
        ) AS due
        WHERE customer_id::text || ' ' || host <> ALL($6)
    ) AS due
    WHERE host_rank <= $3
) AS due
JOIN customers AS c ON c.id = due.customer_id
WHERE customer_rank <= $5
ORDER BY callback_tries, callback_at LIMIT $2

-- name: record_callback_attempt
-- $1: job. $2: seconds until the next attempt; null: none. $3: HTTP status; 0: no response.
UPDATE jobs SET callback_tries = callback_tries + 1, callback_status = $3,
    callback_at = clock_timestamp() + make_interval(secs => $2)
WHERE id = $1
