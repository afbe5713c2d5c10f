-- What customers have used, counted from the audit (ledger/audit/queries.py, ledger/audit/quota_restore.py).

-- name: set_statement_timeout
-- $1: milliseconds. Applies until the transaction ends.
SELECT set_config('statement_timeout', $1::bigint::text, true)

-- name: customer_usage
-- $1: customer. The last 24 hours. Uses the index on (customer_id, created_at).
SELECT count(*), count(*) FILTER (WHERE status = 'completed'), count(*) FILTER (WHERE status = 'failed'),
       coalesce(sum(tokens_used), 0)::bigint
FROM requests WHERE customer_id = $1 AND created_at > now() - interval '24 hours'

-- name: customer_gpu_share
-- $1: customer. $2: the lowest request id of the window. GPU milliseconds of the customer and of all (a batch's time is shared
-- equally), and the accepted, completed and failed requests of the customer. Ids begin with the time, so the primary key is used.
SELECT coalesce(sum(r.gpu_ms / greatest(r.batch_size, 1)) FILTER (WHERE r.customer_id = $1), 0),
       coalesce(sum(r.gpu_ms / greatest(r.batch_size, 1)), 0),
       count(*) FILTER (WHERE r.customer_id = $1),
       count(*) FILTER (WHERE r.customer_id = $1 AND r.status = 'completed'),
       count(*) FILTER (WHERE r.customer_id = $1 AND r.status = 'failed')
FROM requests AS r WHERE r.id >= $2 AND r.created_at > now() - interval '1 hour'

-- name: customer_errors
-- $1: customer. $2: row limit. The newest failed requests of the last hour.
SELECT id, created_at, model, error_code, http_status
FROM requests
WHERE customer_id = $1 AND created_at > now() - interval '1 hour' AND status = 'failed'
ORDER BY created_at DESC LIMIT $2

-- name: clock_timestamp
SELECT clock_timestamp()

-- name: quota_spent
-- $1: start of the window. $2: its end. $3: customers. $4: error codes of failures that are charged.
SELECT customer_id::text, count(*)
FROM requests
WHERE customer_id = ANY ($3::uuid[]) AND created_at >= $1 AND created_at < $2
  AND (status <> 'failed' OR error_code = ANY ($4::text[])
       OR (error_code = 'deadline_exceeded' AND tokens_used > 0)) -- A stream that was delivered in part.
GROUP BY customer_id
