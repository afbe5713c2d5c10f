-- batch: the lists and the lease of one batch (needs prelude and ending).
-- load_batch(id) gives {id, state, size, worker, token, tiers, losses}, or nil where no such batch is left.
local function load_batch(id)
  local row = redis.call('HMGET', P .. 'batch:' .. id, 'state', 'size', 'worker', 'token', 'tiers', 'losses')
  if not row[1] then return nil end
  local batch = {id = id, state = row[1], size = tonumber(row[2]), worker = row[3] or '', token = row[4] or '', tiers = {},
    losses = tonumber(row[6] or 0)}
  for tier in string.gmatch(row[5], '%S+') do batch.tiers[#batch.tiers + 1] = tier end
  return batch
end

-- each_member(batch, visit): visit(id, row, list) for every id that is still processing in this batch, oldest first a tier.
local function each_member(batch, visit)
  for _, tier in ipairs(batch.tiers) do
    local list = P .. 'inflight:' .. tier .. ':' .. batch.id
    local ids = redis.call('LRANGE', list, 0, -1)
    for i = #ids, 1, -1 do
      local row = read(ids[i])
      if row[STATE] == 'processing' and row[BATCH] == batch.id then visit(ids[i], row, list)
      else redis.call('LREM', list, 1, ids[i]) end
    end
  end
end

local function lease(batch, lease_ms)
  redis.call('ZADD', P .. 'leases', now + lease_ms, batch.id)
end

-- keep(batch, keep_ms): how long its keys outlive this moment, should everybody who cares for it be gone.
local function keep(batch, keep_ms)
  redis.call('PEXPIRE', P .. 'batch:' .. batch.id, keep_ms)
  for _, tier in ipairs(batch.tiers) do redis.call('PEXPIRE', P .. 'inflight:' .. tier .. ':' .. batch.id, keep_ms) end
end

-- stand_first(batch, size, lease_ms, keep_ms): nobody's again, and the next that a worker takes. `batch` may be new.
local function stand_first(batch, size, lease_ms, keep_ms)
  redis.call('HSET', P .. 'batch:' .. batch.id, 'state', 'formed', 'size', size, 'tiers', table.concat(batch.tiers, ' '),
    'losses', batch.losses, 'worker', '', 'token', '')
  keep(batch, keep_ms)
  lease(batch, lease_ms)
  redis.call('LPUSH', P .. 'batch_queue', batch.id)
end

-- drop_batch(batch): forget a batch whose members have all left it.
local function drop_batch(batch)
  for _, tier in ipairs(batch.tiers) do redis.call('DEL', P .. 'inflight:' .. tier .. ':' .. batch.id) end
  redis.call('DEL', P .. 'batch:' .. batch.id)
  redis.call('ZREM', P .. 'leases', batch.id)
end
