#!lua flags=allow-oom
-- census: count the healthy GPUs into `healthy_gpu_count`, which ages out by itself when nobody counts.
-- A Redis that came back empty knows no worker until each has beaten again: until then the last count stands.
-- KEYS[1] leases. ARGV: 1 prefix, 2 ms of silence after which a worker is gone, 3 ms that the count holds, 4 the last
--   count, 5 the epoch in which it was made ('': there is none, or it is too old), 6 ms that notices are kept,
--   7... what this scheduler says of itself, for health: none while all is well.
-- Returns {healthy, known, epoch}.
-- include: prelude, protocol, epoch, wake, workers
if other_protocol() then return other_protocol() end
note_protocol()
local healthy, known = count_workers(tonumber(ARGV[2]))
local epoch = begin_epoch()
if ARGV[5] ~= '' and ARGV[5] ~= epoch then healthy = math.max(healthy, tonumber(ARGV[4])) end
local before = redis.call('GET', P .. 'healthy_gpu_count')
redis.call('SET', P .. 'healthy_gpu_count', healthy, 'PX', tonumber(ARGV[3]))
if tonumber(before) ~= healthy then wake() end
if #ARGV > 6 then
  for i = 7, #ARGV do redis.call('ZADD', P .. 'notices', now + ARGV[6], ARGV[i]) end
  redis.call('ZREMRANGEBYSCORE', P .. 'notices', '-inf', now)
  redis.call('PEXPIRE', P .. 'notices', tonumber(ARGV[6]))
end
return {healthy, known, epoch}
