#!lua
-- quota_restore: restore the usage of quotas from the audit, after Redis may have lost it. Only ever raises a count.
-- KEYS[1] leases. ARGV: 1 prefix, 2 packed {{customer id, period, ms when its window began, spent}...}, 3 the epoch of the
--   Redis that has all counts with this call, '' while more follow: after another loss all are needed again.
-- Returns how many were raised. A count of another window than the present one is ignored.
-- include: prelude, ratelimit/quota
local raised = 0
for _, q in ipairs(cmsgpack.unpack(ARGV[2])) do
  local key, field = 'rl:customer:' .. q[1], 'q:' .. q[2]
  local number, ends = window(q[2])
  local of, spent = string.match(redis.call('HGET', key, field) or '', '^(%d+) (%d+)$')
  local known = tonumber(of) == number and tonumber(spent) or 0
  if window_at(q[2], q[3]) == number and known < q[4] then
    redis.call('HSET', key, field, string.format('%.0f %.0f', number, q[4]))
    local keep_ms = math.ceil(ends - now) + 1000
    if redis.call('PTTL', key) < keep_ms then redis.call('PEXPIRE', key, keep_ms) end
    raised = raised + 1
  end
end
if ARGV[3] ~= '' then redis.call('SET', P .. 'quotas_told', ARGV[3]) end
return raised
