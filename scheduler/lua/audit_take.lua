#!lua flags=allow-oom
-- audit_take: move the oldest outbox entries into this auditor's own list, and adopt what other auditors left behind.
-- Only the auditor that holds the lock in PostgreSQL calls this, so any other list is a dead auditor's.
-- KEYS[1] leases. ARGV: 1 prefix, 2 auditor id, 3 limit of entries in the own list, 4 bytes with which it ends
--   early: dead letters carry bodies, and an answer too large for the call's time would never be had.
-- Returns the own list, oldest first.
-- include: prelude
local own = P .. 'outbox:' .. ARGV[2]
local held, out = redis.call('LRANGE', own, 0, -1), {}
local room, bytes = tonumber(ARGV[3]) - #held, tonumber(ARGV[4])
for i = #held, 1, -1 do out[#out + 1], bytes = held[i], bytes - #held[i] end

local function move(list)
  while room > 0 and bytes > 0 do
    local entry = redis.call('LMOVE', list, own, 'RIGHT', 'LEFT')
    if not entry then return end
    out[#out + 1], room, bytes = entry, room - 1, bytes - #entry
  end
end

for _, other in ipairs(redis.call('SMEMBERS', P .. 'auditors')) do
  local list = P .. 'outbox:' .. other
  if other ~= ARGV[2] then move(list) end
  if other ~= ARGV[2] and redis.call('EXISTS', list) == 0 then redis.call('SREM', P .. 'auditors', other) end
end
move(P .. 'outbox')
if #out > 0 then redis.call('SADD', P .. 'auditors', ARGV[2]) end
return out
