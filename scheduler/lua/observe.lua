#!lua flags=allow-oom
-- observe: everything that health, limits and the scheduler look at, in one atomic look.
-- KEYS[1] leases. ARGV: 1 prefix, 2 packed tier names, 3 ms of silence after which a worker is gone.
-- Returns packed {queues, workers, {ms since its last heartbeat, stats} of each gateway, outbox length, dlq length, ms since a
--   scheduler last passed or -1 where none is known, the same of whoever did its work, what schedulers say of themselves}.
-- include: prelude, queues, workers
local gateways = {}
local beating = redis.call('ZRANGE', P .. 'gateways', 0, -1, 'WITHSCORES')
for i = 1, #beating, 2 do
  local stats = redis.call('HGET', P .. 'gateway:' .. beating[i], 'stats')
  if stats then gateways[#gateways + 1] = {math.max(0, now - beating[i + 1]), stats} end
end
local rows = workers(tonumber(ARGV[3]))
local worked, passed = redis.call('GET', P .. 'reaped_at'), redis.pcall('GET', P .. 'scheduled_at')
if type(passed) ~= 'string' then passed = worked end -- an older scheduler says only the first
local function age(at) return at and tonumber(at) >= 0 and math.max(0, now - at) or -1 end
return cmsgpack.pack({queues(cmsgpack.unpack(ARGV[2])), rows, gateways, redis.call('LLEN', P .. 'outbox'),
  redis.call('LLEN', P .. 'dlq'), age(passed), age(worked),
  redis.call('ZRANGEBYSCORE', P .. 'notices', now, '+inf', 'LIMIT', 0, 20)})
