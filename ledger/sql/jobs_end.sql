-- Ends as arrays: queued or processing -> completed or failed, once; whoever comes later changes nothing. An end of another
-- customer's request is none of this job. $7 seconds that the result is kept. Returns the jobs that have ended by this.
UPDATE jobs AS j
SET status = e.status, output = e.output, error_code = e.error_code, tokens_used = e.tokens_used,
    completed_at = clock_timestamp(), expires_at = clock_timestamp() + make_interval(secs => $7),
    callback_at = CASE WHEN j.callback_url IS NOT NULL THEN clock_timestamp() END
FROM unnest($1::text[], $2::text[], $3::text[], $4::bytea[], $5::text[], $6::int[])
    AS e (id, customer_id, status, output, error_code, tokens_used)
WHERE j.id = e.id AND (e.customer_id = '' OR j.customer_id::text = e.customer_id)
  AND j.status IN ('queued', 'processing')
RETURNING j.id
