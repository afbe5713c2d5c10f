-- $1 request id, $2 id of the new request that never came to be, $3 and $4 what stood there before.
UPDATE dead_letters SET requeued_as = $3, requeued_at = $4 WHERE request_id = $1 AND requeued_as = $2
