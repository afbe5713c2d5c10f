#!lua flags=allow-oom
-- observe: return everything that health, limits and schedulers observe of a pool, atomically.
-- KEYS[1] leases. ARGV: packed_tiers: their names; gone_ms without a heartbeat after which a worker is lost.
-- Returns packed {queues, workers, {ms since its last heartbeat, stats} of each gateway, outbox length, dlq length, ms since
--   the last pass of a scheduler or -1 if unknown, the same of any process that does its work, notices of schedulers, the
--   epoch in microseconds or 0 before the first heartbeat of a gateway}.
-- include: prelude, slots, backlogs, queues, worker_status, workers
local gateways = {}
local heartbeats = call('ZRANGE', P .. 'gateways', 0, -1, 'WITHSCORES')
for i = 1, #heartbeats, 2 do
  local stats = call('HGET', P .. 'gateway:' .. heartbeats[i], 'stats')
  if stats then gateways[#gateways + 1] = {math.max(0, now - heartbeats[i + 1]), stats} end
end
local rows = workers(gone_ms)
local last_pass, scheduler_pass = call('GET', P .. 'reaped_at'), redis.pcall('GET', P .. 'scheduled_at')
if type(scheduler_pass) ~= 'string' then scheduler_pass = last_pass end -- an older scheduler writes only the first
local function age(at) return at and tonumber(at) >= 0 and math.max(0, now - at) or -1 end
return cmsgpack.pack({queues(cmsgpack.unpack(packed_tiers), {}), rows, gateways, call('LLEN', P .. 'outbox'),
  call('LLEN', P .. 'dlq'), age(scheduler_pass), age(last_pass),
  call('ZRANGEBYSCORE', P .. 'notices', now, '+inf', 'LIMIT', 0, 20), tonumber(call('GET', P .. 'epoch')) or 0})
