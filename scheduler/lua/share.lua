#!lua flags=allow-oom
-- share: end followers of runs that have ended, if there are more than the end of the run processed; a few per call.
-- KEYS[1] leases. ARGV: none.
-- Returns 1 if more are left, else 0.
-- include: prelude, slots, row, ratelimit/metered, refund, backlogs, settlement, finalize, batch, retry_budget, coalescing_keys, followers
for _, primary in ipairs(call('ZRANGE', P .. 'sharing', 0, 15)) do
  local stored = redis.pcall('HMGET', P .. 'request:' .. primary, 'told', 'same', 'losses')
  local hash, has_more = string.match(stored[2] or '', '^%S+'), false
  local is_readable = stored[1] and pcall(cmsgpack.unpack, stored[1])
  if is_readable then has_more = finalize_followers(primary, stored[1])
  elseif hash then has_more = promote_follower(primary, hash, tonumber(stored[3]) or 0) end
  if not has_more then call('ZREM', P .. 'sharing', primary) end
end
flush()
return call('EXISTS', P .. 'sharing')
