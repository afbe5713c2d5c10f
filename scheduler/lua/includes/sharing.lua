-- sharing: what a leader leaves to its riders (needs prelude, row, repaying, ending, same and riders). An outcome that
-- another run would repeat is theirs as well: a few of them are told at once, and `sharing` names whose are not all told.
-- Any other end is the leader's own, and the next of them runs.
local owing, KEEP_MS, AGAIN = false, 60000, {poison_request = true, invalid_request = true, invalid_output = true}

-- bequeath(...): for one that has been closed so; `run` is false where its output is not here.
local function bequeath(id, row, state, code, batch, run)
  local key = P .. 'request:' .. id
  local hash, ttl_ms, version = string.match(call('HGET', key, 'same') or '', '^(%S+) (%d+) (.*)$')
  if not hash then return end
  local led, told = let_go(hash, id), nil
  if led and run and state == 'completed' then keep_answer(hash, tonumber(ttl_ms), version, run[USED], run[BYTES], run[TAIL]) end
  if run and (state == 'completed' or AGAIN[code] or row.buried) then
    told = cmsgpack.pack(state, code, batch.id, batch.size, batch.worker, run[USED], run[BYTES], unrun(run[TAIL]))
  end
  local left
  if told then left = give(id, told) else left = succeed(id, hash) end
  if not left then return end
  if told then call('HSET', key, 'told', told) end
  call('ZADD', P .. 'sharing', now, id)
  call('PEXPIRE', P .. 'sharing', KEEP_MS)
  owing = true
end

local write_ends = flush
local function flush()
  for _, leader in ipairs(ridden) do bequeath(unpack(leader)) end
  write_ends()
end
