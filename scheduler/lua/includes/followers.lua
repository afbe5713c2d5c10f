-- followers: requests that wait for the run of an equal one, and how they end (needs batch, ending, retry_budget and same).
-- riders: those who wait for the run of an equal request, their leader (needs prelude, row, repaying, ending, batch and
-- same). `riders:<leader>` holds their ids, oldest first. A call looks at a few of them only.
local room, HEIR_LEASE_MS, HEIR_KEEP_MS = 64, 600, 60000

-- each_rider(leader, visit) -> whether there may be more: visit(id, row) for those that still ride, until it says true.
local function each_rider(leader, visit)
  while room > 0 do
    local id = call('LPOP', P .. 'riders:' .. leader)
    if not id then return false end
    room = room - 1
    local row = read(id)
    if row[STATE] == 'riding' and visit(id, row) then return false end
  end
  return call('EXISTS', P .. 'riders:' .. leader) == 1
end

-- give(leader, told) -> whether any are left: they end as it did, without a run of their own.
local function give(leader, told)
  local state, code, id, size, worker, used, bytes, tail = cmsgpack.unpack(told)
  local batch, run = {id = id, size = size, worker = worker, losses = 0, served_from = 'collapsed'}, {-1, used, bytes, tail}
  return each_rider(leader, function(rider, row) return not close(rider, row, state, code, batch, run) end)
end

-- stand_in(id, row, losses): it runs in the leader's place, first in its tier; it waited in time, so that it may wait until
-- its deadline. What lost workers before never joins fresh work: then it is a batch by itself.
local function stand_in(id, row, losses)
  local key, tier, env = P .. 'request:' .. id, party(row).tier, row[ENV]
  local batch = {id = sub(id, 5), losses = losses, last = row[DEADLINE]}
  -- One that was lifted may have an old place still: with two of them it would run twice.
  if call('HDEL', key, 'lifted') == 1 then call('LREM', P .. 'queue:' .. tier, -1, id) end
  call('HSET', key, 'state', 'queued', 'env', sub(env, 1, 28) .. sub(env, 15, 27) .. sub(env, 42))
  if losses == 0 then call('RPUSH', P .. 'queue:' .. tier, id)
  else
    call('HSET', key, 'state', 'processing', 'batch', batch.id, 'losses', losses)
    call('LPUSH', P .. 'inflight:' .. tier .. ':' .. batch.id, id)
    batch.tiers = {tier}
    stand_first(batch, 1, HEIR_LEASE_MS, HEIR_KEEP_MS)
  end
  if call('LLEN', P .. 'wake') == 0 then call('LPUSH', P .. 'wake', 1) end
end

-- succeed(leader, hash, losses) -> whether any are left to be looked at: the oldest that has time left leads the others.
local function succeed(leader, hash, losses)
  return each_rider(leader, function(id, row)
    if now >= row[DEADLINE] then return not close(id, row, 'failed', 'deadline_exceeded', NO_BATCH, NO_RUN) end
    stand_in(id, row, losses)
    local left = P .. 'riders:' .. leader
    if call('EXISTS', left) == 1 then call('RENAME', left, P .. 'riders:' .. id) end
    if call('EXISTS', P .. 'same:' .. hash) == 0 then lead(hash, id, row[DEADLINE] - now) end
    return true
  end)
end

-- sharing: what a leader leaves to its riders (needs prelude, row, repaying, ending, retry_budget, same and riders).
-- An outcome that another run would repeat is theirs as well: a few of them are told at once, and `sharing` names whose are
-- not all told. Any other end is the leader's own, and the next of them runs, with its losses: what killed workers for one
-- kills no more of them for the next.
local owing, OWING_KEEP_MS, AGAIN = false, 60000, {poison_request = true, invalid_request = true, invalid_output = true}

-- final(...) -> how riders end at once, packed; nil where one of them runs.
local function final(row, state, code, batch, run, losses)
  if run and (state == 'completed' or AGAIN[code] or row.buried) then
    return cmsgpack.pack(state, code, batch.id, batch.size, batch.worker, run[USED], run[BYTES], unrun(run[TAIL]))
  end
  if losses > 0 and withdraw(1) == 0 then -- it would be a retry, of which the pool can afford no more
    return cmsgpack.pack('failed', 'worker_lost', '', 0, '', 0, 0, NO_RUN[TAIL])
  end
end

-- bequeath(...): for one that has been closed so; `run` is false where its output is not here.
local function bequeath(id, row, state, code, batch, run)
  local known = redis.pcall('HMGET', P .. 'request:' .. id, 'same', 'losses')
  if known.err then return end
  local hash, ttl_ms, version = string.match(known[1] or '', '^(%S+) (%d+) (.*)$')
  if not hash then return end
  local led, losses, left = let_go(hash, id), tonumber(known[2]) or 0, nil
  if led and run and state == 'completed' then keep_answer(hash, tonumber(ttl_ms), version, run[USED], run[BYTES], run[TAIL]) end
  if call('EXISTS', P .. 'riders:' .. id) == 0 then return end
  local told = final(row, state, code, batch, run, losses)
  if told then left = give(id, told) else left = succeed(id, hash, losses) end
  if not left then return end
  if told then call('HSET', P .. 'request:' .. id, 'told', told) end
  call('ZADD', P .. 'sharing', now, id)
  -- As long as any of them may be told: whoever tells them may be away for a while.
  local kept_ms = math.max(OWING_KEEP_MS, call('PTTL', P .. 'riders:' .. id))
  outlive(P .. 'sharing', kept_ms)
  outlive(P .. 'request:' .. id, kept_ms)
  owing = true
end

local write_ends = flush
local function flush()
  end_damaged()
  for _, leader in ipairs(ridden) do bequeath(unpack(leader)) end
  write_ends()
end
