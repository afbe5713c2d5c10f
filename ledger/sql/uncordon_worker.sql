-- $1 worker.
DELETE FROM cordons WHERE worker = $1 RETURNING true
