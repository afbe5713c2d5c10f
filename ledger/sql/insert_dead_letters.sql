-- $1 request id, $2 when it ended (null: not known, so now), $3 customer, $4 tier, $5 model, $6 error code, $7 attempts,
-- $8 workers, $9 body. One that is there already stays as it is, so that it may be written any number of times.
INSERT INTO dead_letters (request_id, dead_at, customer_id, tier, model, error_code, attempts, worker_ids, body)
VALUES ($1, coalesce($2, now()), $3, $4, $5, $6, $7, $8, $9)
ON CONFLICT (request_id) DO NOTHING
