-- batch: the lists and the lease of one batch (needs prelude and ending).
-- load_batch(id) gives {id, state, size, worker, token, tiers, losses, formed}, or nil where no such batch is left. `losses`
-- says how often its members were lost, `formed` when they left their tier queues: together, so that it is told once.
-- One that cannot be read is dropped: its members end at their deadlines, by their gateways.
local function load_batch(id)
  local row = redis.pcall('HMGET', P .. 'batch:' .. id, 'state', 'size', 'worker', 'token', 'tiers', 'losses', 'at')
  if row.err and of_wrong_type(row.err) or row[1] and not (tonumber(row[2]) and row[5] and tonumber(row[6] or 0)) then
    redis.log(redis.LOG_WARNING, 'The batch ' .. id .. ' is damaged or of another version and was dropped.')
    call('DEL', P .. 'batch:' .. id)
    call('ZREM', P .. 'leases', id)
    return nil
  end
  if not row[1] then return nil end
  local batch = {id = id, state = row[1], size = tonumber(row[2]), worker = row[3] or '', token = row[4] or '', tiers = {},
    losses = tonumber(row[6] or 0), formed = tonumber(row[7])}
  for tier in string.gmatch(row[5], '%S+') do batch.tiers[#batch.tiers + 1] = tier end
  return batch
end

-- each_member(batch, visit, last): visit(id, row, list) for every id that is still processing in this batch, oldest first a
-- tier; `last` as in read, or a table that has it, which `visit` may change.
local function each_member(batch, visit, last)
  for _, tier in ipairs(batch.tiers) do
    local list = P .. 'inflight:' .. tier .. ':' .. batch.id
    local ids = call('LRANGE', list, 0, -1)
    for i = #ids, 1, -1 do
      local row = read(ids[i], last)
      if row[STATE] == 'processing' and row[BATCH] == batch.id then last = visit(ids[i], row, list) or last
      else call('LREM', list, 1, ids[i]) end
    end
  end
end

local function lease(batch, lease_ms)
  call('ZADD', P .. 'leases', now + lease_ms, batch.id)
end

-- keep(batch, keep_ms): how long its keys outlive this moment, or the deadline of each of its members (`batch.last`) where
-- that is known, should no worker and no scheduler renew them. Never shortens what they have: a batch that ran out would
-- leave its members without anybody who could run or end them.
local function keep(batch, keep_ms)
  local ms = math.max(0, (batch.last or now) - now) + keep_ms
  if not batch.fresh then outlive(P .. 'batch:' .. batch.id, ms) else call('PEXPIRE', P .. 'batch:' .. batch.id, ms) end
  for _, tier in ipairs(batch.tiers) do
    local list = P .. 'inflight:' .. tier .. ':' .. batch.id
    if not batch.fresh then outlive(list, ms) else call('PEXPIRE', list, ms) end
  end
end

-- stand_first(batch, size, lease_ms, keep_ms): nobody's again, and the next that a worker takes. `batch` may be new, and
-- then has `last`, the latest deadline of its members.
local function stand_first(batch, size, lease_ms, keep_ms)
  call('HSET', P .. 'batch:' .. batch.id, 'state', 'formed', 'size', size, 'tiers', table.concat(batch.tiers, ' '),
    'losses', batch.losses, 'at', batch.formed or now, 'worker', '', 'token', '')
  keep(batch, keep_ms)
  lease(batch, lease_ms)
  call('LPUSH', P .. 'batch_queue', batch.id)
end

-- drop_batch(batch): forget a batch whose members have all left it.
local function drop_batch(batch)
  for _, tier in ipairs(batch.tiers) do call('DEL', P .. 'inflight:' .. tier .. ':' .. batch.id) end
  call('DEL', P .. 'batch:' .. batch.id)
  call('ZREM', P .. 'leases', batch.id)
end
