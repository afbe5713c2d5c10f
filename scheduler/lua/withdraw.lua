#!lua flags=allow-oom
-- withdraw: ask a worker with slots to return runs that have sent nothing.
-- KEYS[1] leases. ARGV: 1 prefix, 2 worker id, 3 packed {{}, number of runs, {queue...}}, 4 ms that this is kept.
-- Returns 1.
-- include: prelude
call('RPUSH', P .. 'stops:' .. ARGV[2], ARGV[3])
call('PEXPIRE', P .. 'stops:' .. ARGV[2], tonumber(ARGV[4]))
return 1
