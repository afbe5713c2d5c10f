-- queues: numbers of queued and running work, O(1) in queue length (needs prelude, slots and backlogs).
-- queues(tiers) -> {now, {{tier, depth with backlogs, oldest_ms}...}, ready batches, leased batches, healthy GPUs or -1, tiers in
-- which quiet customers wait, ms since the last batch was formed or -1, slots.view()}.
local function queues(tiers)
  local rows, waiting, quiet = {}, backlogs.counts(tiers), {}
  for i, tier in ipairs(tiers) do
    local oldest_ms, ids = 0, backlogs.heads(tier)
    ids[#ids + 1] = call('LINDEX', P .. 'queue:' .. tier, -1) or nil
    for _, id in ipairs(ids) do
      local env = redis.pcall('HGET', P .. 'request:' .. id, 'env')
      local accepted_at = type(env) == 'string' and tonumber(string.sub(env, 1, 13))
      if accepted_at then oldest_ms = math.max(oldest_ms, now - accepted_at) end
    end
    if waiting[i] > 0 and tonumber(backlogs.read(P .. 'fair:' .. tier, 'quiet')[1] or 0) > 0 then quiet[#quiet + 1] = tier end
    rows[i] = {tier, call('LLEN', P .. 'queue:' .. tier) + waiting[i], oldest_ms}
  end
  -- By pcall, because a Redis user with older ACL rules has no access to this key.
  local formed_at = redis.pcall('GET', P .. 'formed_at')
  formed_at = type(formed_at) == 'string' and tonumber(formed_at)
  return {now, rows, call('LLEN', P .. 'batch_queue'), call('ZCARD', P .. 'leases'),
    tonumber(call('GET', P .. 'healthy_gpu_count') or -1), quiet, formed_at and math.max(0, now - formed_at) or -1, slots.view()}
end
