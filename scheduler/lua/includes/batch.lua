-- batch: the lists and the lease of one batch (needs prelude, slots, row and finalize).
-- load_batch(id) -> {id, state, size, worker, token, tiers, losses, formed, costs, empty, slots}, or nil if the batch does not
-- exist. `losses` is how often its members were lost, `formed` when they left their tier queues; both are the same for all members.
-- `empty`: the empty part of a batch of quiet customers. `slots`: its members start and end one by one. A batch that cannot be read
-- is deleted; its gateways end its members at their deadlines.
local function load_batch(id)
  local row = redis.pcall('HMGET', P .. 'batch:' .. id, 'state', 'size', 'worker', 'token', 'tiers', 'losses', 'at',
    'costs', 'empty', 'slots')
  if row.err and is_wrong_type(row.err) or row[1] and not (tonumber(row[2]) and row[5] and tonumber(row[6] or 0)) then
    redis.log(redis.LOG_WARNING, 'The batch ' .. id .. ' is damaged or of another version and was dropped.')
    call('DEL', P .. 'batch:' .. id)
    call('ZREM', P .. 'leases', id)
    slots.claimed(id)
    return nil
  end
  if not row[1] then return nil end
  local batch = {id = id, state = row[1], size = tonumber(row[2]), worker = row[3] or '', token = row[4] or '', tiers = {},
    losses = tonumber(row[6] or 0), formed = tonumber(row[7]), costs = row[8], empty = tonumber(row[9]), slots = row[10] == '1'}
  for tier in string.gmatch(row[5], '%S+') do batch.tiers[#batch.tiers + 1] = tier end
  return batch
end

-- each_member(batch, visit, last_field): visit(id, row, list) for each member that is still processing, oldest first per tier.
-- `last_field` as in read_row; a value that `visit` returns replaces it for the rest.
local function each_member(batch, visit, last_field)
  local batch_id = batch.id
  for _, tier in ipairs(batch.tiers) do
    local list = P .. 'inflight:' .. tier .. ':' .. batch.id
    local ids = call('LRANGE', list, 0, -1)
    for i = #ids, 1, -1 do
      local id = ids[i]
      local row, is_damaged = peek_row(id, last_field)
      if is_damaged then row = set_aside(id, row, last_field) end
      if row[STATE] == 'processing' and row[BATCH] == batch_id then last_field = visit(id, row, list) or last_field
      else call('LREM', list, 1, id) end
    end
  end
end

-- is_empty(batch): whether all its members have ended.
local function is_empty(batch)
  for _, tier in ipairs(batch.tiers) do
    if call('EXISTS', P .. 'inflight:' .. tier .. ':' .. batch.id) == 1 then return false end
  end
  return true
end

-- ends_as_left(id, row, batch, run) -> whether the client of a request has left while it ran in a slot. Then it ends as cancelled,
-- with the tokens that the run used or, if nothing has counted those, that were delivered.
local function ends_as_left(id, row, batch, run)
  local left = tonumber(call('HGET', P .. 'request:' .. id, 'left'))
  if not left then return false end
  if run[USED] <= 0 and left > 0 then run = {run[GPU_MS], left, 0, cmsgpack.pack(run[GPU_MS], left, '', '', 0, 'stop'), run[COST]} end
  return finalize(id, row, 'failed', 'cancelled', batch, run)
end

-- How long a worker that is replaced may be away, in ms.
local RESTART_MS = 5000

-- restart_wait(id, row): the request waits again after a run without a result: its queue timeout begins anew. The field `wait` has
-- it in ms. It is not shorter than the restart of a worker, so that a short timeout fails no request whose worker is replaced.
local function restart_wait(id, row)
  local key, env = P .. 'request:' .. id, row[ENV]
  local wait_ms = tonumber(call('HGET', key, 'wait')) or math.max(RESTART_MS, row[QUEUE_DEADLINE] - row[AT])
  local queue_deadline = time_column[math.min(row[DEADLINE], now + wait_ms)]
  call('HSET', key, 'wait', wait_ms, 'env', sub(env, 1, 28) .. queue_deadline .. sub(env, 43))
end

local function lease(batch, lease_ms)
  call('ZADD', P .. 'leases', now + lease_ms, batch.id)
end

-- keep(batch, keep_ms): extends the lifetime of its keys to `keep_ms` after now, or after the latest deadline of its members
-- (`batch.last`) if that is known. Never shortens it: if the keys of a batch expired, no process could run or end its members.
local function keep(batch, keep_ms)
  local ms = math.max(0, (batch.last or now) - now) + keep_ms
  if not batch.fresh then extend_ttl(P .. 'batch:' .. batch.id, ms) else call('PEXPIRE', P .. 'batch:' .. batch.id, ms) end
  for _, tier in ipairs(batch.tiers) do
    local list = P .. 'inflight:' .. tier .. ':' .. batch.id
    if not batch.fresh then extend_ttl(list, ms) else call('PEXPIRE', list, ms) end
  end
end

-- push_first(batch, size, lease_ms, keep_ms): makes a batch ready, without an owner, at the head of batch_queue. A new batch has
-- `last`, the latest deadline of its members.
local function push_first(batch, size, lease_ms, keep_ms)
  local key = P .. 'batch:' .. batch.id
  call('HSET', key, 'state', 'formed', 'size', size, 'tiers', table.concat(batch.tiers, ' '), 'losses', batch.losses,
    'at', batch.formed or now, 'worker', '', 'token', '')
  if batch.costs then call('HSET', key, 'costs', batch.costs) end
  if batch.slots then
    call('HSET', key, 'slots', '1')
    slots.formed(batch.id, size)
  end
  keep(batch, keep_ms)
  lease(batch, lease_ms)
  call('LPUSH', P .. 'batch_queue', batch.id)
end

-- delete_batch(batch): deletes a batch that has no members left.
local function delete_batch(batch)
  local keys = {P .. 'batch:' .. batch.id}
  for i, tier in ipairs(batch.tiers) do keys[i + 1] = P .. 'inflight:' .. tier .. ':' .. batch.id end
  call('DEL', unpack(keys))
  call('ZREM', P .. 'leases', batch.id)
  if batch.slots then slots.claimed(batch.id) end
end
