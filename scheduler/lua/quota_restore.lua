#!lua
-- quota_restore: restore the usage of quotas from the audit, after Redis may have lost it. Counts are only raised.
-- KEYS[1] leases. ARGV: packed_spent {{customer id, period, start of its window in ms, spent}...}; told: the epoch and the names of
--   cells that are not open, if all counts are restored with this call, '' while more follow: after another loss all are needed again.
-- Returns how many were raised. Counts of other windows than the current one are ignored.
-- include: prelude, ratelimit/quota
local raised = 0
for _, q in ipairs(cmsgpack.unpack(packed_spent)) do
  local key, field = T .. 'rl:customer:' .. q[1], 'q:' .. q[2]
  local number, ends_at = window(q[2])
  local stored_number, spent = string.match(call('HGET', key, field) or '', '^(%d+) (%d+)$')
  local known = tonumber(stored_number) == number and tonumber(spent) or 0
  if window_at(q[2], q[3]) == number and known < q[4] then
    call('HSET', key, field, string.format('%.0f %.0f', number, q[4]))
    local keep_ms = math.ceil(ends_at - now) + 1000
    if call('PTTL', key) < keep_ms then call('PEXPIRE', key, keep_ms) end
    raised = raised + 1
  end
end
if told ~= '' then call('SET', P .. 'quotas_told', told) end
return raised
