#!lua flags=allow-oom
-- reap: batches whose lease ran out. Never claimed: renewed while it stands in line, pushed again when it was popped
-- and lost, neither costs an attempt. Claimed: its worker is lost, and its members are retried or ended.
-- KEYS[1] leases. ARGV: 1 prefix, 2 limit, 3 retry budget, 4 least ms left for a retry, 5 lease ms.
-- Returns {renewed, pushed again, retried, batches without a trace}.
-- include: prelude, wake, ending, batch, retry
local rule = {budget = tonumber(ARGV[3]), min_left_ms = tonumber(ARGV[4]), lease_ms = tonumber(ARGV[5])}
local renewed, pushed, retried, unknown = 0, 0, 0, 0
for _, id in ipairs(redis.call('ZRANGEBYSCORE', P .. 'leases', '-inf', now, 'LIMIT', 0, ARGV[2])) do
  local batch = load_batch(id)
  if not batch then
    redis.call('ZREM', P .. 'leases', id)
    unknown = unknown + 1
  elseif batch.state == 'running' then
    retry(batch, 'worker_lost', rule)
    retried = retried + 1
  else
    lease(batch, rule.lease_ms)
    if redis.call('LPOS', P .. 'batch_queue', id) then renewed = renewed + 1
    else
      redis.call('LPUSH', P .. 'batch_queue', id)
      pushed = pushed + 1
    end
  end
end
flush()
if pushed + retried + unknown > 0 then wake() end
return {renewed, pushed, retried, unknown}
