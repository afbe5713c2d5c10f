#!lua flags=allow-oom
-- expire: end requests that waited too long, and remove ids of ended requests from the tier queues, oldest first.
-- KEYS[1] leases. ARGV: 1 prefix, 2 packed tier names, 3 limit of ids per tier and call.
-- Returns {ended, swept, 1 if `share` has more to do, else 0, recorded damaged rows}. Customers of one tier may have different
-- queue timeouts, so the whole window is checked: overdue requests behind one that is in time also end, and stay as dead
-- entries until they are the oldest.
-- include: prelude, protocol, row, refund, finalize, batch, retry_budget, coalescing_keys, followers
if protocol_error() then return protocol_error() end
local ended_now, swept = 0, 0
for _, tier in ipairs(cmsgpack.unpack(ARGV[2])) do
  local list = P .. 'queue:' .. tier
  local ids = call('LRANGE', list, -tonumber(ARGV[3]), -1)
  local all_ended = true -- whether all ids so far, from the oldest, have ended
  for i = #ids, 1, -1 do
    local row = read_row(ids[i])
    local is_waiting = row[STATE] == 'queued'
    if is_waiting and now >= math.min(row[DEADLINE], row[QUEUE_DEADLINE]) then
      finalize(ids[i], row, 'failed', now >= tonumber(row[DEADLINE]) and 'deadline_exceeded' or 'queue_timeout', NO_BATCH, NO_RUN)
      ended_now, is_waiting = ended_now + 1, false
    elseif not is_waiting and all_ended then
      swept = swept + 1
    end
    all_ended = all_ended and not is_waiting
    if all_ended then call('RPOP', list) end
  end
end
flush()
return {ended_now, swept, call('EXISTS', P .. 'sharing'), call('LLEN', P .. 'damaged')}
