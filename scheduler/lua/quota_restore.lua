#!lua
-- quota_restore: restore the usage of quotas from the audit, after Redis may have lost it. Counts are only raised.
-- KEYS[1] leases. ARGV: packed_spent {{customer id, period, number of its window, its start and end in ms, spent}...}; told: the epoch
--   and the names of cells that are not open, if all counts are restored with this call, '' while more follow: after another loss all
--   are needed again.
-- Returns how many were raised. Counts of other windows than the current one are ignored, as are those of windows before the stored
-- one: see window in quota.
-- include: prelude
local raised = 0
for _, q in ipairs(cmsgpack.unpack(packed_spent)) do
  local key, field = T .. 'rl:customer:' .. q[1], 'q:' .. q[2]
  local stored_number, spent = string.match(call('HGET', key, field) or '', '^(%d+) (%d+)$')
  local ahead = stored_number and stored_number - q[3] or -1
  local is_current = now >= q[4] and now < q[5] and not (ahead == 1 or ahead == 2)
  if is_current and (ahead == 0 and tonumber(spent) or 0) < q[6] then
    call('HSET', key, field, string.format('%.0f %.0f', q[3], q[6]))
    local keep_ms = math.ceil(q[5] - now) + 1000
    if call('PTTL', key) < keep_ms then call('PEXPIRE', key, keep_ms) end
    raised = raised + 1
  end
end
if told ~= '' then call('SET', P .. 'quotas_told', told) end
return raised
