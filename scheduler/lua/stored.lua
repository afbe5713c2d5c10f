#!lua flags=allow-oom
-- stored: the results of these jobs are in PostgreSQL, so their rows need not be kept for the case that PostgreSQL is
-- unavailable. A repeated call is harmless.
-- KEYS[1] leases. ARGV: keep_ms of such a row from now on, packed_ids.
-- Returns how many have ended. A row of an Idempotency-Key is kept, but once it is evicted no longer than other rows.
-- include: prelude
local count = 0
for _, id in ipairs(cmsgpack.unpack(packed_ids)) do
  local key = P .. 'request:' .. id
  local row = redis.pcall('HMGET', key, 'state', 'idem')
  if not row.err and (row[1] == 'completed' or row[1] == 'failed') then
    count = count + 1
    if row[2] then call('HSET', key, 'stored', string.format('%.0f', now + keep_ms))
    elseif call('PTTL', key) > keep_ms then call('PEXPIRE', key, keep_ms) end
  end
end
return count
