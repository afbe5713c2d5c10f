#!lua flags=allow-oom
-- history_add: add the newest point of the dashboard history; a repeated call adds it once.
-- KEYS[1] leases. ARGV: the point, max_points, keep_ms without a new one, resolution: hour or week.
-- Returns the number of points.
-- include: prelude
local key = resolution == 'week' and P .. 'history_week' or P .. 'history'
if call('LINDEX', key, 0) ~= point then call('LPUSH', key, point) end
call('LTRIM', key, 0, max_points - 1)
call('PEXPIRE', key, keep_ms)
return call('LLEN', key)
