-- queues: what waits and what runs, O(1) in queue length (needs prelude).
-- queues(tiers) -> {now, {{tier, depth, oldest_ms}...}, ready batches, leased batches, healthy GPUs or -1}.
local function queues(tiers)
  local rows = {}
  for i, tier in ipairs(tiers) do
    local list, oldest_ms = P .. 'queue:' .. tier, 0
    local depth = redis.call('LLEN', list)
    if depth > 0 then
      local at = redis.call('HGET', P .. 'request:' .. redis.call('LINDEX', list, -1), 'at')
      if at then oldest_ms = math.max(0, now - at) end
    end
    rows[i] = {tier, depth, oldest_ms}
  end
  return {now, rows, redis.call('LLEN', P .. 'batch_queue'), redis.call('ZCARD', P .. 'leases'),
    tonumber(redis.call('GET', P .. 'healthy_gpu_count') or -1)}
end
