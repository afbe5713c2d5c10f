-- queues: numbers of queued and running work, O(1) in queue length (needs prelude).
-- queues(tiers) -> {now, {{tier, depth, oldest_ms}...}, ready batches, leased batches, healthy GPUs or -1}.
local function queues(tiers)
  local rows = {}
  for i, tier in ipairs(tiers) do
    local list, oldest_ms = P .. 'queue:' .. tier, 0
    local depth = call('LLEN', list)
    if depth > 0 then
      local env = redis.pcall('HGET', P .. 'request:' .. call('LINDEX', list, -1), 'env')
      local accepted_at = type(env) == 'string' and tonumber(string.sub(env, 1, 13))
      if accepted_at then oldest_ms = math.max(0, now - accepted_at) end
    end
    rows[i] = {tier, depth, oldest_ms}
  end
  return {now, rows, call('LLEN', P .. 'batch_queue'), call('ZCARD', P .. 'leases'),
    tonumber(call('GET', P .. 'healthy_gpu_count') or -1)}
end
