#!lua flags=allow-oom
-- observe: return everything that health, limits and schedulers observe of a pool, atomically.
-- KEYS[1] leases. ARGV: 1 prefix, 2 packed tier names, 3 ms without a heartbeat after which a worker is lost.
-- Returns packed {queues, workers, {ms since its last heartbeat, stats} of each gateway, outbox length, dlq length, ms since
--   the last pass of a scheduler or -1 if unknown, the same of any process that does its work, notices of schedulers}.
-- include: prelude, queues, workers
local gateways = {}
local beating = redis.call('ZRANGE', P .. 'gateways', 0, -1, 'WITHSCORES')
for i = 1, #beating, 2 do
  local stats = redis.call('HGET', P .. 'gateway:' .. beating[i], 'stats')
  if stats then gateways[#gateways + 1] = {math.max(0, now - beating[i + 1]), stats} end
end
local rows = workers(tonumber(ARGV[3]))
local worked, passed = redis.call('GET', P .. 'reaped_at'), redis.pcall('GET', P .. 'scheduled_at')
if type(passed) ~= 'string' then passed = worked end -- an older scheduler writes only the first
local function age(at) return at and tonumber(at) >= 0 and math.max(0, now - at) or -1 end
return cmsgpack.pack({queues(cmsgpack.unpack(ARGV[2])), rows, gateways, redis.call('LLEN', P .. 'outbox'),
  redis.call('LLEN', P .. 'dlq'), age(passed), age(worked),
  redis.call('ZRANGEBYSCORE', P .. 'notices', now, '+inf', 'LIMIT', 0, 20)})
