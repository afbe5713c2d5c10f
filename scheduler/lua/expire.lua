#!lua flags=allow-oom
-- expire: end what waited too long, and sweep ids that ended while they stood in a tier queue, oldest first.
-- KEYS[1] leases. ARGV: 1 prefix, 2 packed tier names, 3 limit of ids a tier and call.
-- Returns {ended, swept, 1 where `share` has something to do, else 0, damaged rows that were noted}. Customers of one tier may differ in queue age, so
-- the whole window is looked at: what is overdue behind one that may still wait ends as well, and stays as a dead entry
-- until it is the oldest.
-- include: prelude, protocol, row, repaying, ending, batch, retry_budget, same, followers
if other_protocol() then return other_protocol() end
local ended_now, swept = 0, 0
for _, tier in ipairs(cmsgpack.unpack(ARGV[2])) do
  local list = P .. 'queue:' .. tier
  local ids = redis.call('LRANGE', list, -tonumber(ARGV[3]), -1)
  local oldest = true -- so far, from the oldest on, nobody is alive
  for i = #ids, 1, -1 do
    local row = read(ids[i])
    local waits = row[STATE] == 'queued'
    if waits and now >= math.min(row[DEADLINE], row[QUEUE_DEADLINE]) then
      close(ids[i], row, 'failed', now >= tonumber(row[DEADLINE]) and 'deadline_exceeded' or 'queue_timeout', NO_BATCH, NO_RUN)
      ended_now, waits = ended_now + 1, false
    elseif not waits and oldest then
      swept = swept + 1
    end
    oldest = oldest and not waits
    if oldest then redis.call('RPOP', list) end
  end
end
flush()
return {ended_now, swept, call('EXISTS', P .. 'sharing'), call('LLEN', P .. 'damaged')}
