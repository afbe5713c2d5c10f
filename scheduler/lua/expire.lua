#!lua flags=allow-oom
-- expire: end what waited too long, and sweep ids that ended while they stood in a tier queue, oldest first.
-- KEYS[1] leases. ARGV: 1 prefix, 2 packed tier names, 3 limit of ids a tier and call.
-- Returns {ended, swept}. A tier has one queue age, so the first id that may still wait ends the look.
-- include: prelude, ending
local ended_now, swept = 0, 0
for _, tier in ipairs(cmsgpack.unpack(ARGV[2])) do
  local list = P .. 'queue:' .. tier
  for _ = 1, tonumber(ARGV[3]) do
    local id = redis.call('LINDEX', list, -1)
    if not id then break end
    local row = read(id)
    if row[STATE] == 'queued' then
      local code = now >= tonumber(row[DEADLINE]) and 'deadline_exceeded' or 'queue_timeout'
      if now < math.min(row[DEADLINE], row[QUEUE_DEADLINE]) then break end
      close(id, row, 'failed', code, NO_BATCH, NO_RUN)
      ended_now = ended_now + 1
    else
      swept = swept + 1
    end
    redis.call('RPOP', list)
  end
end
flush()
return {ended_now, swept}
