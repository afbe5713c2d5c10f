#!lua flags=allow-oom
-- gateway_beat: a gateway says that it lives; without this key its queued work is dropped before the GPU.
-- KEYS[1] leases. ARGV: 1 prefix, 2 gateway id, 3 packed stats, 4 ms that the beat holds.
-- Returns 1 where the gateway was not known, which means that Redis came back empty or the gateway is new, else 0.
-- include: prelude
local key = P .. 'gateway:' .. ARGV[2]
local fresh = 1 - redis.call('EXISTS', key)
redis.call('HSET', key, 'stats', ARGV[3], 'last_heartbeat', now)
redis.call('PEXPIRE', key, tonumber(ARGV[4]))
redis.call('ZADD', P .. 'gateways', now, ARGV[2])
redis.call('ZREMRANGEBYSCORE', P .. 'gateways', '-inf', now - tonumber(ARGV[4]))
return fresh
