#!lua flags=allow-oom
-- audit_take: move the oldest outbox entries into this auditor's own list, and adopt what other auditors left behind.
-- Only the auditor that holds the lock in PostgreSQL calls this, so any other list is a dead auditor's.
-- KEYS[1] leases. ARGV: 1 prefix, 2 auditor id, 3 limit of entries in the own list.
-- Returns the own list, oldest first.
-- include: prelude
local own = P .. 'outbox:' .. ARGV[2]
local room = tonumber(ARGV[3]) - redis.call('LLEN', own)
for _, other in ipairs(redis.call('SMEMBERS', P .. 'auditors')) do
  local list = P .. 'outbox:' .. other
  while other ~= ARGV[2] and room > 0 and redis.call('LMOVE', list, own, 'RIGHT', 'LEFT') do room = room - 1 end
  if other ~= ARGV[2] and redis.call('EXISTS', list) == 0 then redis.call('SREM', P .. 'auditors', other) end
end
while room > 0 and redis.call('LMOVE', P .. 'outbox', own, 'RIGHT', 'LEFT') do room = room - 1 end
if redis.call('EXISTS', own) == 1 then redis.call('SADD', P .. 'auditors', ARGV[2]) end
local entries = redis.call('LRANGE', own, 0, -1)
local out = {}
for i = #entries, 1, -1 do out[#out + 1] = entries[i] end
return out
