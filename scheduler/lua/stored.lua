#!lua flags=allow-oom
-- stored: the results of these jobs are in PostgreSQL, so their rows need not be kept for the case that PostgreSQL is
-- unavailable. A repeated call is harmless.
-- KEYS[1] leases. ARGV: 1 prefix, 2 ms that such a row is still kept, 3 packed ids.
-- Returns how many have ended. A row of an Idempotency-Key is kept, but once it is evicted no longer than other rows.
-- include: prelude
local ms, count = tonumber(ARGV[2]), 0
for _, id in ipairs(cmsgpack.unpack(ARGV[3])) do
  local key = P .. 'request:' .. id
  local row = redis.pcall('HMGET', key, 'state', 'idem')
  if not row.err and (row[1] == 'completed' or row[1] == 'failed') then
    count = count + 1
    if row[2] then call('HSET', key, 'stored', string.format('%.0f', now + ms))
    elseif call('PTTL', key) > ms then call('PEXPIRE', key, ms) end
  end
end
return count
