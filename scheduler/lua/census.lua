#!lua flags=allow-oom
-- census: count the healthy GPUs into `healthy_gpu_count`, which expires if no scheduler updates it.
-- After a loss of its data, Redis knows no worker until its next heartbeat: until then the last count is valid.
-- KEYS[1] leases. ARGV: gone_ms without a heartbeat after which a worker is lost; valid_ms of the count; last_count;
--   last_epoch, in which it was made ('': none, or too old); notice_ms that notices are kept; notices: problems that this
--   scheduler reports for health.
-- Returns {healthy, known, epoch}.
-- include: prelude, protocol, slots, epoch, wake, worker_status, workers
if protocol_error() then return protocol_error() end
store_protocol()
local healthy, known = count_workers(gone_ms)
slots.forget(is_usable(gone_ms))
local epoch = begin_epoch()
if last_epoch ~= '' and last_epoch ~= epoch then healthy = math.max(healthy, last_count) end
local old_count = call('GET', P .. 'healthy_gpu_count')
call('SET', P .. 'healthy_gpu_count', healthy, 'PX', valid_ms)
if tonumber(old_count) ~= healthy then wake() end
if #notices > 0 then
  for _, notice in ipairs(notices) do call('ZADD', P .. 'notices', now + notice_ms, notice) end
  call('ZREMRANGEBYSCORE', P .. 'notices', '-inf', now)
  call('PEXPIRE', P .. 'notices', notice_ms)
end
return {healthy, known, epoch}
