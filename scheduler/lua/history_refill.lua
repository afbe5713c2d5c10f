#!lua flags=allow-oom
-- history_refill: after a loss of data, add the points before the first new one. A repeated call adds them once: they are
--   accepted only while there is at most one point.
-- KEYS[1] leases. ARGV: 1 prefix, 2 ms that they are kept without a new one, 3... points, the newest first.
-- Returns the number of points.
-- include: prelude
local key = P .. 'history'
if call('LLEN', key) <= 1 then call('RPUSH', key, unpack(ARGV, 3)) end
call('PEXPIRE', key, tonumber(ARGV[2]))
return call('LLEN', key)
