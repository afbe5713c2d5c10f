-- customer_save: what a call leaves of its customers (needs prelude, bucket and customer).
local LEASES_KEPT_MS = 600000

local function save_customer(c)
  local fields = {'tokens', string.format('%.6f', c.tokens), 'at', string.format('%.0f', now_us), 'rate', c.rate}
  local keep_ms = math.max(60000, 2 * ms_until(c.tokens, c.burst, c.rate))
  if c.pace > 0 then
    local n = #fields
    fields[n + 1], fields[n + 2], fields[n + 3], fields[n + 4] = 'budget', string.format('%.3f', c.budget), 'pace', c.pace
    keep_ms = math.max(keep_ms, 2 * ms_until(c.budget, c.pace, c.pace / 60))
  end
  for _, q in ipairs(c.quotas) do
    fields[#fields + 1] = 'q:' .. q.period
    fields[#fields + 1] = string.format('%.0f %.0f', q.number, q.spent)
    keep_ms = math.max(keep_ms, q.ends - now + 1000)
  end
  redis.call('HSET', c.key, unpack(fields))
  redis.call('PEXPIRE', c.key, keep_ms)
end

local function save_customers()
  for _, c in pairs(customers) do
    if c.spent then save_customer(c) end
    if #c.entered > 0 then
      if c.stale then redis.call('ZREMRANGEBYSCORE', c.leases, '-inf', now) end
      redis.call('ZADD', c.leases, unpack(c.entered))
      -- Not with the last lease: one that was put in before may last longer.
      redis.call('PEXPIREAT', c.leases, math.ceil(c.entered[#c.entered - 1]) + LEASES_KEPT_MS)
    end
  end
end
