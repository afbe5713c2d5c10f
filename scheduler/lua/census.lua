#!lua flags=allow-oom
-- census: count the healthy GPUs into `healthy_gpu_count`, which expires if no scheduler updates it.
-- After a loss of its data, Redis knows no worker until its next heartbeat: until then the last count is valid.
-- KEYS[1] leases. ARGV: 1 prefix, 2 ms without a heartbeat after which a worker is lost, 3 ms that the count is valid, 4 the
--   last count, 5 the epoch in which it was made ('': none, or too old), 6 ms that notices are kept, 7... problems that this
--   scheduler reports for health.
-- Returns {healthy, known, epoch}.
-- include: prelude, protocol, slots, epoch, wake, worker_status, workers
if protocol_error() then return protocol_error() end
store_protocol()
local healthy, known = count_workers(tonumber(ARGV[2]))
slots.forget(is_usable(tonumber(ARGV[2])))
local epoch = begin_epoch()
if ARGV[5] ~= '' and ARGV[5] ~= epoch then healthy = math.max(healthy, tonumber(ARGV[4])) end
local old_count = call('GET', P .. 'healthy_gpu_count')
call('SET', P .. 'healthy_gpu_count', healthy, 'PX', tonumber(ARGV[3]))
if tonumber(old_count) ~= healthy then wake() end
if #ARGV > 6 then
  for i = 7, #ARGV do call('ZADD', P .. 'notices', now + ARGV[6], ARGV[i]) end
  call('ZREMRANGEBYSCORE', P .. 'notices', '-inf', now)
  call('PEXPIRE', P .. 'notices', tonumber(ARGV[6]))
end
return {healthy, known, epoch}
