#!lua flags=allow-oom
-- history_refill: after a loss of data, add the points before the first new one. A repeated call adds them once: they are
--   accepted only while there is at most one point.
-- KEYS[1] leases. ARGV: keep_ms without a new one, resolution: hour or week; points, the newest first.
-- Returns the number of points.
-- include: prelude
local key = resolution == 'week' and P .. 'history_week' or P .. 'history'
if call('LLEN', key) <= 1 then call('RPUSH', key, unpack(points)) end
call('PEXPIRE', key, keep_ms)
return call('LLEN', key)
