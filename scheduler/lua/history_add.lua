#!lua flags=allow-oom
-- history_add: add the newest point of the dashboard history; a repeated call adds it once.
-- KEYS[1] leases. ARGV: 1 prefix, 2 the point, 3 maximum number of points, 4 ms that they are kept without a new one.
-- Returns the number of points.
-- include: prelude
local key = P .. 'history'
if call('LINDEX', key, 0) ~= ARGV[2] then call('LPUSH', key, ARGV[2]) end
call('LTRIM', key, 0, tonumber(ARGV[3]) - 1)
call('PEXPIRE', key, tonumber(ARGV[4]))
return call('LLEN', key)
