#!lua flags=allow-oom
-- withdraw: ask a worker with slots to return runs that have sent nothing.
-- KEYS[1] leases. ARGV: worker_id, packed_signal {{}, number of runs, {queue...}}, keep_ms of this.
-- Returns 1.
-- include: prelude
call('RPUSH', P .. 'stops:' .. worker_id, packed_signal)
call('PEXPIRE', P .. 'stops:' .. worker_id, keep_ms)
return 1
