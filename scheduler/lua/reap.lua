#!lua flags=allow-oom
-- reap: process batches whose lease expired. Not claimed: the lease and the lifetime of its keys are renewed while it is in
-- batch_queue; if its pop was lost, it is pushed again; neither costs an attempt. Claimed: its worker is lost, and its
-- requests are retried or ended.
-- KEYS[1] leases. ARGV: limit; max_losses, min_left_ms, lease_ms, keep_ms as in `fail`; pass_ms between passes; standing_in: 1 if a
--   gateway calls it in place of schedulers, 0 if a scheduler does.
-- Returns {renewed, pushed again, retried, unknown batches}.
-- include: prelude, slots, protocol, wake, row, ratelimit/metered, refund, backlogs, settlement, finalize, batch, retry_budget, dead_letter, retry, coalescing_keys, followers
if protocol_error() then return protocol_error() end
local rule = {reported = false, max_losses = max_losses, min_left_ms = min_left_ms, lease_ms = lease_ms, keep_ms = keep_ms}
local renewed, pushed, retried, unknown, freed = 0, 0, 0, 0, 0
-- A pass that is late by half a lease: Redis or the schedulers were suspended, and workers may have failed to renew.
local last_pass = tonumber(call('GET', P .. 'reaped_at') or now)
local was_suspended = now - last_pass > pass_ms + lease_ms / 2
call('SET', P .. 'reaped_at', now, 'PX', 60000)
if was_suspended then call('SET', P .. 'resumed_at', now, 'PX', 1000) end -- gateways send heartbeats every 250 ms
-- The last pass of a scheduler, -1 if unknown, as is one after a step back of TIME. A gateway's pass must not count, or the
-- gateway would stop at once. By pcall, because a Redis user with older ACL rules has no access to this key.
if standing_in == 0 then redis.pcall('SET', P .. 'scheduled_at', now, 'PX', 60000)
else
  local at = redis.pcall('GET', P .. 'scheduled_at')
  if not at or type(at) == 'string' and (tonumber(at) or 0) > now then redis.pcall('SET', P .. 'scheduled_at', -1, 'PX', 60000)
  else redis.pcall('PEXPIRE', P .. 'scheduled_at', 60000) end
end

-- waits_too_long(batch, id, row): a batch for free slots is claimed at once, unless its worker is busy or went away. Of a request
-- that a former version retried, the queue deadline is that of its first wait.
local function waits_too_long(batch, id, row)
  if not batch.slots or now < row[QUEUE_DEADLINE] or now - (batch.formed or 0) < RESTART_MS then return false end
  return batch.losses == 0 or call('HEXISTS', P .. 'request:' .. id, 'wait') == 1
end

-- end_overdue(batch) -> whether requests are left: ends overdue requests, and deletes the batch if none is left.
local function end_overdue(batch)
  local left = 0
  each_member(batch, function(id, row, list)
    local code = now >= row[DEADLINE] and 'deadline_exceeded' or waits_too_long(batch, id, row) and 'queue_timeout'
    if not code then left = left + 1 return end
    finalize(id, row, 'failed', code, batch, NO_RUN)
    call('LREM', list, 1, id)
  end)
  if left == 0 then delete_batch(batch) end
  return left > 0
end

-- A lease beyond the maximum was written before TIME was set back: shorten it, or a lost worker would be noticed late.
for _, id in ipairs(call('ZRANGEBYSCORE', P .. 'leases', '(' .. now + lease_ms, '+inf', 'LIMIT', 0, limit)) do
  call('ZADD', P .. 'leases', now + lease_ms, id)
end

for _, id in ipairs(call('ZRANGEBYSCORE', P .. 'leases', '-inf', now, 'LIMIT', 0, limit)) do
  local batch = load_batch(id)
  if not batch then
    call('ZREM', P .. 'leases', id)
    slots.claimed(id)
    unknown = unknown + 1
  elseif batch.state == 'running' and was_suspended then
    lease(batch, lease_ms)
    keep(batch, keep_ms)
    renewed = renewed + 1
  elseif batch.state == 'running' then
    retry(batch, 'worker_lost', rule)
    retried = retried + 1
  elseif not end_overdue(batch) then freed = freed + 1
  else
    lease(batch, lease_ms)
    keep(batch, keep_ms)
    if call('LPOS', P .. 'batch_queue', id) then renewed = renewed + 1
    else
      call('LPUSH', P .. 'batch_queue', id)
      pushed = pushed + 1
    end
  end
end
flush()
if pushed + retried + unknown + freed > 0 then wake() end
return {renewed, pushed, retried, unknown}
