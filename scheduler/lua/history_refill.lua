#!lua flags=allow-oom
-- history_refill: after Redis came back empty, what came before its first moment. Sent twice it is kept once: it is taken
--   where there is no more than one.
-- KEYS[1] leases. ARGV: 1 prefix, 2 ms that they are kept without another, 3... moments, the newest first.
-- Returns how many there are.
-- include: prelude
local key = P .. 'history'
if call('LLEN', key) <= 1 then call('RPUSH', key, unpack(ARGV, 3)) end
call('PEXPIRE', key, tonumber(ARGV[2]))
return call('LLEN', key)
