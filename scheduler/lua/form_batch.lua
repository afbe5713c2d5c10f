#!lua flags=allow-oom
-- form_batch: move the picked ids of the tier queues into one new batch and make it ready, all or nothing.
-- Refuses while enough batches stand ready (late binding). Ids that must not run any more end here instead.
-- KEYS[1] leases. ARGV: 1 prefix, 2 batch id, 3 packed picks {{tier, count}...}, 4 look-ahead in batches, 5 lease ms,
--   6 packed tier names, 7 ms that a batch is kept, 8 ms of silence after which a gateway is gone.
-- Returns packed {size, dropped, queues}: members of the new batch, ids that ended instead, and what waits now.
-- include: prelude, row, repaying, ending, owners, queues
local id, lookahead, lease_ms, keep_ms = ARGV[2], tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[7])
local size, dropped, used = 0, 0, {}

-- unfit(row) -> the error code that ends a queued request now, or nil where it may run.
local function unfit(row)
  if now >= tonumber(row[DEADLINE]) then return 'deadline_exceeded' end
  if now >= tonumber(row[QUEUE_DEADLINE]) then return 'queue_timeout' end
  if abandoned(row, tonumber(ARGV[8])) then return 'gateway_lost' end
end

-- take(tier) -> true: the oldest id joined the batch; false: it ended or had ended before; nil: the queue is empty.
local function take(tier)
  local list = P .. 'inflight:' .. tier .. ':' .. id
  local member = redis.call('RPOPLPUSH', P .. 'queue:' .. tier, list)
  if not member then return nil end
  local row = read(member)
  local code = row[STATE] == 'queued' and unfit(row)
  if row[STATE] == 'queued' and not code then
    redis.call('HSET', P .. 'request:' .. member, 'state', 'processing', 'batch', id)
    return true
  end
  redis.call('LPOP', list)
  if code and close(member, row, 'failed', code, NO_BATCH, NO_RUN) then dropped = dropped + 1 end
  return false
end

if redis.call('LLEN', P .. 'batch_queue') < lookahead then
  for _, pick in ipairs(cmsgpack.unpack(ARGV[3])) do
    local left, looks = pick[2], pick[2] * 4 -- bounded: a heap of dead ids must not hold the server
    while left > 0 and looks > 0 do
      local joined = take(pick[1])
      if joined == nil then break end
      looks = looks - 1
      if joined then left = left - 1 end
    end
    local taken = pick[2] - left
    if taken > 0 then used[#used + 1], size = pick[1], size + taken end
  end
end
if size > 0 then
  for _, tier in ipairs(used) do redis.call('PEXPIRE', P .. 'inflight:' .. tier .. ':' .. id, keep_ms) end
  redis.call('HSET', P .. 'batch:' .. id, 'state', 'formed', 'size', size, 'tiers', table.concat(used, ' '), 'at', now)
  redis.call('PEXPIRE', P .. 'batch:' .. id, keep_ms)
  redis.call('ZADD', P .. 'leases', now + lease_ms, id)
  redis.call('RPUSH', P .. 'batch_queue', id) -- the tail: a retried batch stands at the head
end
flush()
return cmsgpack.pack({size, dropped, queues(cmsgpack.unpack(ARGV[6]))})
