#!lua flags=allow-oom
-- worker_beat: a worker says that it lives, and how it is.
-- KEYS[1] leases. ARGV: 1 prefix, 2 worker id, 3 status, 4 utilization 0..1, 5 requests in flight, 6 packed beat, 7 ms kept.
-- Returns 1 where the status changed (a scheduler is woken), else 0.
-- include: prelude, wake
local key = P .. 'gpu:' .. ARGV[2]
local before = redis.call('HGET', key, 'status')
redis.call('HSET', key, 'status', ARGV[3], 'utilization', ARGV[4], 'in_flight', ARGV[5], 'last_heartbeat', now, 'beat', ARGV[6])
redis.call('PEXPIRE', key, tonumber(ARGV[7]))
redis.call('ZADD', P .. 'gpus', now, ARGV[2])
if before == ARGV[3] then return 0 end
wake()
return 1
