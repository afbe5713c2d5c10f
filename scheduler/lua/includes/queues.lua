-- queues: numbers of queued and running work, O(1) in queue length (needs prelude and backlogs).
-- queues(tiers) -> {now, {{tier, depth with backlogs, ms that the next request has waited}...}, ready batches, leased batches, healthy GPUs or -1}.
local function queues(tiers)
  local rows, waiting = {}, backlogs.counts(tiers)
  for i, tier in ipairs(tiers) do
    local oldest_ms, id = 0, call('LINDEX', P .. 'queue:' .. tier, -1) or waiting[i] > 0 and backlogs.next_id(tier)
    if id then
      local env = redis.pcall('HGET', P .. 'request:' .. id, 'env')
      local accepted_at = type(env) == 'string' and tonumber(string.sub(env, 1, 13))
      if accepted_at then oldest_ms = math.max(0, now - accepted_at) end
    end
    rows[i] = {tier, call('LLEN', P .. 'queue:' .. tier) + waiting[i], oldest_ms}
  end
  return {now, rows, call('LLEN', P .. 'batch_queue'), call('ZCARD', P .. 'leases'),
    tonumber(call('GET', P .. 'healthy_gpu_count') or -1)}
end
