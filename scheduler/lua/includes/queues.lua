-- queues: numbers of queued and running work, O(1) in queue length (needs prelude, slots and backlogs).
-- oldest_ms(tier, length, waiting) -> the age of the oldest of the requests in a tier queue, and of those in backlogs.
local function oldest_ms(tier, length, waiting)
  local oldest, ids = 0, waiting > 0 and backlogs.heads(tier) or {}
  if length > 0 then ids[#ids + 1] = call('LINDEX', P .. 'queue:' .. tier, -1) or nil end
  for _, id in ipairs(ids) do
    local env = redis.pcall('HGET', P .. 'request:' .. id, 'env')
    local accepted_at = type(env) == 'string' and tonumber(string.sub(env, 1, 13))
    if accepted_at then oldest = math.max(oldest, now - accepted_at) end
  end
  return oldest
end

-- queues(tiers, known) -> {now, {{tier, depth with backlogs, oldest_ms}...}, ready batches, leased batches, healthy GPUs or -1,
-- tiers in which quiet customers wait, ms since the last batch was formed or -1, slots.view()}. `known`: what the script knows of
-- it: {waiting: whether backlogs.waiting is true, ready, formed: whether it stored that it formed a batch, no_slots}.
local function queues(tiers, known)
  local rows, quiet = {}, {}
  if not known.waiting then backlogs.counts(tiers) end
  for i, tier in ipairs(tiers) do
    local length, waiting, fair = call('LLEN', P .. 'queue:' .. tier), backlogs.waiting[tier], backlogs.tiers[tier]
    if waiting > 0 then
      local is_quiet = fair and fair.saved_quiet or tonumber(backlogs.read(P .. 'fair:' .. tier, 'quiet')[1] or 0)
      if is_quiet > 0 then quiet[#quiet + 1] = tier end
    end
    rows[i] = {tier, length + waiting, length + waiting > 0 and oldest_ms(tier, length, waiting) or 0}
  end
  -- By pcall, because a Redis user with older ACL rules has no access to this key.
  local formed_at = known.formed and now or redis.pcall('GET', P .. 'formed_at')
  formed_at = type(formed_at) ~= 'table' and tonumber(formed_at)
  return {now, rows, known.ready or call('LLEN', P .. 'batch_queue'), call('ZCARD', P .. 'leases'),
    tonumber(call('GET', P .. 'healthy_gpu_count') or -1), quiet, formed_at and math.max(0, now - formed_at) or -1,
    not known.no_slots and slots.view() or nil}
end
