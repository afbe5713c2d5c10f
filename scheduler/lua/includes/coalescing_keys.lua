-- coalescing_keys: which request runs for all equal ones, and its cached reply (needs prelude). `same:<hash>` has `leader`, the
-- id of the primary that is queued or runs, or `answer`: packed used tokens, bytes and tail of a reply, until it expires.
local function set_primary(hash, id, ms_left)
  local PRIMARY_SLACK_MS = 1000
  call('HSET', P .. 'same:' .. hash, 'leader', id)
  call('PEXPIRE', P .. 'same:' .. hash, math.ceil(ms_left) + PRIMARY_SLACK_MS)
end

-- clear_primary(hash, id) -> whether it was the primary.
local function clear_primary(hash, id)
  return call('HGET', P .. 'same:' .. hash, 'leader') == id and call('DEL', P .. 'same:' .. hash) == 1
end

-- without_gpu_ms(tail): the tail of a reply for a request that did not run: its first field, the time of the run, becomes -1.
local function without_gpu_ms(tail)
  return packed[-1] .. string.sub(tail, cmsgpack.unpack_one(tail) + 1)
end

-- cache_reply(hash, ttl_ms, version, used, bytes, tail): caches a small reply for equal requests, if it is of the model version
-- that all workers had when the request was accepted. Beyond MAX_CACHED, the reply that expires first is deleted.
local function cache_reply(hash, ttl_ms, version, used, bytes, tail)
  local MAX_BYTES, MAX_CACHED = 16384, 10000 -- at most 160 MB of replies
  local _, _, _, reply_version = cmsgpack.unpack_limit(tail, 3)
  if ttl_ms <= 0 or version == '' or version ~= reply_version or bytes > MAX_BYTES then return end
  call('HSET', P .. 'same:' .. hash, 'answer', cmsgpack.pack(used, bytes, without_gpu_ms(tail)))
  call('PEXPIRE', P .. 'same:' .. hash, ttl_ms)
  local index = P .. 'same_kept'
  call('ZREMRANGEBYSCORE', index, '-inf', now)
  call('ZADD', index, now + ttl_ms, hash)
  if call('PTTL', index) < ttl_ms then call('PEXPIRE', index, ttl_ms) end
  if call('ZCARD', index) > MAX_CACHED then call('HDEL', P .. 'same:' .. call('ZPOPMIN', index)[1], 'answer') end
end
