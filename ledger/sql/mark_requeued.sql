-- $1 request id, $2 id of the new request, $3 what must stand there now, so that of two who requeue it one is told.
UPDATE dead_letters SET requeued_as = $2, requeued_at = now()
WHERE request_id = $1 AND requeued_as IS NOT DISTINCT FROM $3
