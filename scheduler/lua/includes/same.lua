-- same: which request runs for all equal ones, and the answer that it left (needs prelude). `same:<hash>` has `leader`, the
-- id of the one that waits or runs, or `answer`, packed tokens used, bytes and end of a reply, for as long as it is kept.
local MOST_BYTES, MOST_KEPT, LEAD_SLACK_MS = 16384, 10000, 1000 -- 160 MB of answers at the most

local function lead(hash, id, ms_left)
  call('HSET', P .. 'same:' .. hash, 'leader', id)
  call('PEXPIRE', P .. 'same:' .. hash, math.ceil(ms_left) + LEAD_SLACK_MS)
end

-- let_go(hash, id): it leads no more -> whether it did.
local function let_go(hash, id)
  return call('HGET', P .. 'same:' .. hash, 'leader') == id and call('DEL', P .. 'same:' .. hash) == 1
end

-- unrun(tail): the end of a reply to who shares it: the time of the run, which comes first, is not its own.
local function unrun(tail)
  return packed[-1] .. string.sub(tail, cmsgpack.unpack_one(tail) + 1)
end

-- keep_answer(hash, ttl_ms, version, used, bytes, tail): for who asks the same, where it is small, and of the version of the
-- model that all workers had when it was asked. There is room for so many: the one that would end first makes way.
local function keep_answer(hash, ttl_ms, version, used, bytes, tail)
  local _, _, _, of = cmsgpack.unpack_limit(tail, 3)
  if ttl_ms <= 0 or version == '' or version ~= of or bytes > MOST_BYTES then return end
  call('HSET', P .. 'same:' .. hash, 'answer', cmsgpack.pack(used, bytes, unrun(tail)))
  call('PEXPIRE', P .. 'same:' .. hash, ttl_ms)
  local kept = P .. 'same_kept'
  call('ZREMRANGEBYSCORE', kept, '-inf', now)
  call('ZADD', kept, now + ttl_ms, hash)
  if call('PTTL', kept) < ttl_ms then call('PEXPIRE', kept, ttl_ms) end
  if call('ZCARD', kept) > MOST_KEPT then call('HDEL', P .. 'same:' .. call('ZPOPMIN', kept)[1], 'answer') end
end
