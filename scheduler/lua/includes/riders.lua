-- riders: those who wait for the run of an equal request, their leader (needs prelude, row, repaying, ending and same).
-- `riders:<leader>` holds their ids, oldest first. A call looks at a few of them only.
local room = 64

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

-- stand_first_in_line(id, row, losses): it is queued, before all of its tier. It waited in time: for that it has until its
-- deadline. One that was lifted once may have an old place still; two of them would have it run twice.
local function stand_first_in_line(id, row, losses)
  local key, queue, env = P .. 'request:' .. id, P .. 'queue:' .. party(row).tier, row[ENV]
  if call('HDEL', key, 'lifted') == 1 then call('LREM', queue, -1, id) end
  call('HSET', key, 'state', 'queued', 'losses', losses, 'env', sub(env, 1, 28) .. sub(env, 15, 27) .. sub(env, 42))
  call('RPUSH', queue, id)
  if call('LLEN', P .. 'wake') == 0 then call('LPUSH', P .. 'wake', 1) end
end

-- succeed(leader, hash) -> whether any are left to be looked at. The oldest that has time left runs in the leader's place,
-- and inherits its losses: what killed workers for one kills no more of them for the next.
local function succeed(leader, hash)
  return each_rider(leader, function(id, row)
    if now >= row[DEADLINE] then return not close(id, row, 'failed', 'deadline_exceeded', NO_BATCH, NO_RUN) end
    stand_first_in_line(id, row, call('HGET', P .. 'request:' .. leader, 'losses') or 0)
    local left = P .. 'riders:' .. leader
    if call('EXISTS', left) == 1 then call('RENAME', left, P .. 'riders:' .. id) end
    if call('HEXISTS', P .. 'same:' .. hash, 'leader') == 0 then lead(hash, id, row[DEADLINE] - now) end
    return true
  end)
end
