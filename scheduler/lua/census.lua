#!lua flags=allow-oom
-- census: count the healthy GPUs into `healthy_gpu_count`, which ages out by itself when nobody counts.
-- KEYS[1] leases. ARGV: 1 prefix, 2 ms of silence after which a worker is gone, 3 ms that the count holds.
-- Returns {healthy, known}.
-- include: prelude, wake, workers
local healthy, known = count_workers(tonumber(ARGV[2]))
local before = redis.call('GET', P .. 'healthy_gpu_count')
redis.call('SET', P .. 'healthy_gpu_count', healthy, 'PX', tonumber(ARGV[3]))
if tonumber(before) ~= healthy then wake() end
return {healthy, known}
