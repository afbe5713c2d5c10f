#!lua flags=allow-oom
-- audit_drop: remove taken entries that are committed, and store separately those that cannot be written.
-- The oldest of them is named by its hash, so that a late call, after other entries were taken, removes nothing.
-- KEYS[1] leases. ARGV: auditor_id, count to remove, SHA-1 of the oldest as oldest_name, max_bad of the list, the bad ones.
-- Returns 1, or 0 if the oldest entry is another one.
-- include: prelude
local own = P .. 'outbox:' .. auditor_id
local oldest = call('LINDEX', own, -1)
if not oldest or redis.sha1hex(oldest) ~= oldest_name then return 0 end
for _, entry in ipairs(bad) do call('LPUSH', P .. 'outbox_bad', entry) end
call('LTRIM', P .. 'outbox_bad', 0, max_bad - 1)
call('RPOP', own, count)
return 1
