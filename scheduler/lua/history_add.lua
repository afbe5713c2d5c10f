#!lua flags=allow-oom
-- history_add: keep one more moment, the newest; sent twice it is kept once.
-- KEYS[1] leases. ARGV: 1 prefix, 2 the moment, 3 most moments, 4 ms that they are kept without another.
-- Returns how many there are.
-- include: prelude
local key = P .. 'history'
if call('LINDEX', key, 0) ~= ARGV[2] then call('LPUSH', key, ARGV[2]) end
call('LTRIM', key, 0, tonumber(ARGV[3]) - 1)
call('PEXPIRE', key, tonumber(ARGV[4]))
return call('LLEN', key)
