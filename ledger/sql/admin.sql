-- Changes that a gateway makes for an operator (ledger/admin/transaction.py).

-- name: set_actor
-- $1: the name that config_changes records as changed_by, until the transaction ends.
SELECT set_config('tierlane.actor', $1, true)

-- name: lock_holders
-- $1: pid of a session. Returns the sessions that block it, the oldest transaction first.
SELECT pid, usename, application_name, client_addr, state,
       extract(epoch FROM clock_timestamp() - xact_start)::float8 AS open_s
FROM pg_stat_activity WHERE pid = ANY (pg_blocking_pids($1)) ORDER BY xact_start

-- name: cordon_worker
-- $1: worker. $2: reason. A worker that is already cordoned keeps its reason.
INSERT INTO cordons (worker, reason) VALUES ($1, $2) ON CONFLICT (worker) DO NOTHING RETURNING true

-- name: uncordon_worker
-- $1: worker.
DELETE FROM cordons WHERE worker = $1 RETURNING true
