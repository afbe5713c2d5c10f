#!lua flags=allow-oom
-- audit_drop: remove taken entries that are committed, and store separately those that cannot be written.
-- The oldest of them is named by its hash, so that a late call, after other entries were taken, removes nothing.
-- KEYS[1] leases. ARGV: 1 prefix, 2 auditor id, 3 entries to remove, 4 SHA-1 of the oldest, 5 cap of the bad list, 6... bad.
-- Returns 1, or 0 if the oldest entry is another one.
-- include: prelude
local own = P .. 'outbox:' .. ARGV[2]
local oldest = call('LINDEX', own, -1)
if not oldest or redis.sha1hex(oldest) ~= ARGV[4] then return 0 end
for i = 6, #ARGV do call('LPUSH', P .. 'outbox_bad', ARGV[i]) end
call('LTRIM', P .. 'outbox_bad', 0, tonumber(ARGV[5]) - 1)
call('RPOP', own, tonumber(ARGV[3]))
return 1
