#!lua flags=allow-oom
-- share: end followers of runs that have ended, if there are more than the end of the run processed; a few per call.
-- KEYS[1] leases. ARGV: 1 prefix.
-- Returns 1 if more are left, else 0.
-- include: prelude, row, repaying, ending, batch, retry_budget, same, followers
for _, leader in ipairs(call('ZRANGE', P .. 'sharing', 0, 15)) do
  local known = redis.pcall('HMGET', P .. 'request:' .. leader, 'told', 'same', 'losses')
  local hash, left = string.match(known[2] or '', '^%S+'), false
  local readable = known[1] and pcall(cmsgpack.unpack, known[1])
  if readable then left = give(leader, known[1])
  elseif hash then left = succeed(leader, hash, tonumber(known[3]) or 0) end
  if not left then call('ZREM', P .. 'sharing', leader) end
end
flush()
return call('EXISTS', P .. 'sharing')
