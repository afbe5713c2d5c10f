-- retry: a batch that its worker lost runs again, whole or in parts (needs batch, ending and retry_budget).
-- parts: a lost batch in smaller ones (needs prelude, ending and batch). Each is a batch of its own, never mixed with
-- fresh work.

-- parts(seen, losses, count): in how many batches `count` members run next. What a supervisor saw die or hang was most
-- likely done by one of them: in halves, then one by one, so that in its last attempt the guilty one is alone and ends
-- alone. A lease runs out with a host or a network as well: whole at first.
local function parts(seen, losses, count)
  if losses > 1 then return count end
  return seen and math.min(2, count) or 1
end

-- split(batch, kept, count, rule): batches `<id>.1`, `<id>.2`... of their own, the first of them first in line.
local function split(batch, kept, count, rule)
  drop_batch(batch)
  for part = count, 1, -1 do
    local piece, lists = {id = batch.id .. '.' .. part, tiers = {}, losses = batch.losses, formed = batch.formed, last = now}, {}
    local first, last = math.floor((part - 1) * #kept / count) + 1, math.floor(part * #kept / count)
    for i = first, last do
      local tier = kept[i].tier
      piece.last = math.max(piece.last, kept[i].row[DEADLINE])
      if not lists[tier] then lists[tier], piece.tiers[#piece.tiers + 1] = P .. 'inflight:' .. tier .. ':' .. piece.id, tier end
      call('LPUSH', lists[tier], kept[i].id)
      call('HSET', P .. 'request:' .. kept[i].id, 'batch', piece.id)
    end
    stand_first(piece, last - first + 1, rule.lease_ms, rule.keep_ms)
  end
end

-- retry: what becomes of a batch that its worker lost (needs prelude, ending, dead_letters, batch, retry_budget and parts).
-- rule = {seen, budget, min_left_ms, lease_ms, keep_ms}; `seen`: a supervisor saw the loss, else a lease ran out.

-- survivors(batch, cause, rule) -> {id, row, tier} of each member that may run once more, and their losses; others end.
local function survivors(batch, cause, rule)
  local kept, most = {}, 0
  each_member(batch, function(id, row, list)
    local losses = redis.pcall('HINCRBY', P .. 'request:' .. id, 'losses', 1)
    if type(losses) ~= 'number' then set_aside(id, row)
    elseif losses > rule.budget then bury(id, row, cause, batch, NO_RUN)
    elseif row[DEADLINE] - now < rule.min_left_ms then
      close(id, row, 'failed', cause == 'gpu_timeout' and cause or 'deadline_exceeded', batch, NO_RUN)
    else
      kept[#kept + 1], most = {id = id, row = row, tier = party(row).tier}, math.max(most, losses)
      return
    end
    call('LREM', list, 1, id)
  end)
  for i = #kept, withdraw(#kept) + 1, -1 do -- beyond what the pool may afford; oldest and highest tier come first
    close(kept[i].id, kept[i].row, 'failed', 'worker_lost', batch, NO_RUN)
    leave(kept[i].id, kept[i].row)
    kept[i] = nil
  end
  return kept, most
end

-- retry(batch, cause, rule) -> number of members retried.
local function retry(batch, cause, rule)
  local kept, losses = survivors(batch, cause, rule)
  call('LREM', P .. 'batch_queue', 0, batch.id) -- a short list, where it may still stand from before its claim
  if #kept == 0 then drop_batch(batch) return 0 end
  batch.losses = losses
  for _, member in ipairs(kept) do
    local key = P .. 'request:' .. member.id
    call('HSET', key, 'lost_by', (call('HGET', key, 'lost_by') or '') .. ' ' .. batch.worker)
  end
  local count = parts(rule.seen, losses, #kept)
  if count == 1 then stand_first(batch, #kept, rule.lease_ms, rule.keep_ms) else split(batch, kept, count, rule) end
  return #kept
end
