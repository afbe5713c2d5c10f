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
