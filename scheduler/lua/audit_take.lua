#!lua flags=allow-oom
-- audit_take: move the oldest outbox entries into the auditor's own list, after entries that other auditors left, and return
-- those that it does not hold yet. Only the auditor that holds the lock in PostgreSQL calls this: any other list belongs to a
-- dead auditor. Entries that it names as held are not returned again. If its list is not the one that it expects, nothing
-- changes, so that a repeated call returns the same.
-- KEYS[1] leases. ARGV: auditor_id; limit of entries; max_bytes after which it ends early, because dead letters contain bodies
--   and the call has a timeout; held: entries that it holds, the oldest of the own list; SHA-1 of the newest of them as
--   newest_name; held_ms for which these do not count as audit lag.
-- Returns how many of the held entries are there, all or 0, then the entries after them, oldest first.
-- include: prelude
local own, held_key = P .. 'outbox:' .. auditor_id, P .. 'audit_held:' .. auditor_id
local entries_left, bytes_left = limit, max_bytes
local newest = held > 0 and call('LINDEX', own, -held)
if held > 0 and not (newest and redis.sha1hex(newest) == newest_name) then return {0} end
if held > 0 then call('SET', held_key, held, 'PX', held_ms) else call('DEL', held_key) end
local result = {held}

local function add(entry) result[#result + 1], entries_left, bytes_left = entry, entries_left - 1, bytes_left - #entry end

-- Entries that an earlier call took, whose reply was lost. Read in chunks, because they may be large.
local position = held
repeat
  local chunk = call('LRANGE', own, -position - 16, -position - 1)
  for i = #chunk, 1, -1 do
    if entries_left > 0 and bytes_left > 0 then add(chunk[i]) end
  end
  position = position + 16
until #chunk < 16 or entries_left <= 0 or bytes_left <= 0

local function move(list)
  while entries_left > 0 and bytes_left > 0 do
    local entry = call('LMOVE', list, own, 'RIGHT', 'LEFT')
    if not entry then return end
    add(entry)
  end
end

for _, other in ipairs(call('SMEMBERS', P .. 'auditors')) do
  local list = P .. 'outbox:' .. other
  if other ~= auditor_id then move(list) end
  if other ~= auditor_id and call('EXISTS', list) == 0 then call('SREM', P .. 'auditors', other) end
end
move(P .. 'outbox')
if held > 0 or #result > 1 then call('SADD', P .. 'auditors', auditor_id) end
return result
