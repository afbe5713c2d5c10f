-- retry: a batch that its worker lost is retried, whole or in parts (needs batch, finalize and retry_budget). Parts are batches
-- of their own, which no other requests join.

-- part_count(reported, losses, count): into how many batches `count` members are split. A loss that a supervisor reports was
-- probably caused by a member: so halves first, then single requests, and the cause is alone in its last attempt. An expired
-- lease may have other causes (host, network): so the first retry is whole.
local function part_count(reported, losses, count)
  if losses > 1 then return count end
  return reported and math.min(2, count) or 1
end

-- part_of(batch, name, last) -> a new batch for members of this one.
local function part_of(batch, name, last)
  return {id = batch.id .. '.' .. name, tiers = {}, losses = batch.losses, formed = batch.formed, last = last, costs = batch.costs,
    slots = batch.slots}
end

-- split(batch, members, count, rule): makes batches `<id>.1`, `<id>.2`..., the first of them at the head of batch_queue.
local function split(batch, members, count, rule)
  delete_batch(batch)
  for n = count, 1, -1 do
    local part, lists = part_of(batch, n, now), {}
    local first, last = math.floor((n - 1) * #members / count) + 1, math.floor(n * #members / count)
    for i = first, last do
      local tier = members[i].tier
      part.last = math.max(part.last, members[i].row[DEADLINE])
      if not lists[tier] then lists[tier], part.tiers[#part.tiers + 1] = P .. 'inflight:' .. tier .. ':' .. part.id, tier end
      call('LPUSH', lists[tier], members[i].id)
      call('HSET', P .. 'request:' .. members[i].id, 'batch', part.id)
    end
    push_first(part, last - first + 1, rule.lease_ms, rule.keep_ms)
  end
end

-- rule = {reported, max_losses, min_left_ms, lease_ms, keep_ms}; `reported`: a supervisor reported the loss, else a lease expired.

-- lose(id, row, batch, cause, rule) -> the losses of a request, if it may run again; else it ends here.
local function lose(id, row, batch, cause, rule)
  if batch.slots and ends_as_left(id, row, batch, NO_RUN) then return end
  local losses = redis.pcall('HINCRBY', P .. 'request:' .. id, 'losses', 1)
  if type(losses) ~= 'number' then quarantine(id, row)
  elseif losses > rule.max_losses then finalize_as_dead_letter(id, row, cause, batch, NO_RUN)
  elseif row[DEADLINE] - now < rule.min_left_ms then
    finalize(id, row, 'failed', cause == 'gpu_timeout' and cause or 'deadline_exceeded', batch, NO_RUN)
  else return losses end
end

-- survivors(batch, cause, rule) -> {id, row, tier} of each member that may run again, and their losses; the others end.
local function survivors(batch, cause, rule)
  local kept, max_losses = {}, 0
  each_member(batch, function(id, row, list)
    local losses = lose(id, row, batch, cause, rule)
    if losses then kept[#kept + 1], max_losses = {id = id, row = row, tier = account_of(row).tier}, math.max(max_losses, losses)
    else call('LREM', list, 1, id) end
  end)
  for i = #kept, withdraw(#kept) + 1, -1 do -- over the pool's retry budget; oldest and highest tier come first
    finalize(kept[i].id, kept[i].row, 'failed', 'worker_lost', batch, NO_RUN)
    leave_batch(kept[i].id, kept[i].row)
    kept[i] = nil
  end
  return kept, max_losses
end

-- note_loss(id, batch): for the dead letter, if the request becomes one.
local function note_loss(id, batch)
  local key = P .. 'request:' .. id
  call('HSET', key, 'lost_by', (call('HGET', key, 'lost_by') or '') .. ' ' .. batch.worker)
end

-- run_alone(id, row, batch, losses, rule): a request that left its batch gets one of its own, at the head of batch_queue.
local function run_alone(id, row, batch, losses, rule)
  local part, tier = part_of(batch, sub(id, -12), row[DEADLINE]), account_of(row).tier
  part.losses, part.tiers = losses, {tier}
  call('LPUSH', P .. 'inflight:' .. tier .. ':' .. part.id, id)
  call('HSET', P .. 'request:' .. id, 'batch', part.id)
  restart_wait(id, row)
  push_first(part, 1, rule.lease_ms, rule.keep_ms)
end

-- retry_member(id, row, batch, cause, rule): a run of one member was lost. It is retried in a batch of its own, or ends.
local function retry_member(id, row, batch, cause, rule)
  local losses = lose(id, row, batch, cause, rule)
  leave_batch(id, row)
  if not losses then return end
  if withdraw(1) == 0 then return finalize(id, row, 'failed', 'worker_lost', batch, NO_RUN) end
  note_loss(id, batch)
  run_alone(id, row, batch, losses, rule)
end

-- retry(batch, cause, rule) -> number of members that are retried.
local function retry(batch, cause, rule)
  local members, losses = survivors(batch, cause, rule)
  call('LREM', P .. 'batch_queue', 0, batch.id) -- a short list; the id may be there still from before its claim
  if #members == 0 then delete_batch(batch) return 0 end
  batch.losses = losses
  for _, member in ipairs(members) do
    note_loss(member.id, batch)
    if batch.slots then restart_wait(member.id, member.row) end
  end
  local count = batch.slots and #members or part_count(rule.reported, losses, #members)
  if count == 1 then push_first(batch, #members, rule.lease_ms, rule.keep_ms) else split(batch, members, count, rule) end
  return #members
end
