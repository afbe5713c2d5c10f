#!lua flags=allow-oom
-- observe: everything that health, limits and the scheduler look at, in one atomic look.
-- KEYS[1] leases. ARGV: 1 prefix, 2 packed tier names, 3 ms of silence after which a worker is gone.
-- Returns packed {queues, workers, gateway stats, outbox length, dlq length}.
-- include: prelude, queues, workers
local gateways = {}
for _, id in ipairs(redis.call('ZRANGE', P .. 'gateways', 0, -1)) do
  local stats = redis.call('HGET', P .. 'gateway:' .. id, 'stats')
  if stats then gateways[#gateways + 1] = stats end
end
local rows = workers(tonumber(ARGV[3]))
return cmsgpack.pack({queues(cmsgpack.unpack(ARGV[2])), rows, gateways, redis.call('LLEN', P .. 'outbox'), redis.call('LLEN', P .. 'dlq')})
