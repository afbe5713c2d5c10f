#!lua flags=allow-oom
-- share: tell riders of runs that have ended, where there are more of them than the end itself could tell; a few a call.
-- KEYS[1] leases. ARGV: 1 prefix.
-- Returns 1 where more are left, else 0.
-- include: prelude, row, repaying, ending, same, riders, sharing
for _, leader in ipairs(call('ZRANGE', P .. 'sharing', 0, 15)) do
  local known = call('HMGET', P .. 'request:' .. leader, 'told', 'same')
  local hash = string.match(known[2] or '', '^%S+')
  local left = known[1] and give(leader, known[1]) or not known[1] and hash and succeed(leader, hash)
  if not left then call('ZREM', P .. 'sharing', leader) end
end
flush()
return call('EXISTS', P .. 'sharing')
