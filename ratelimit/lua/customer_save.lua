-- customer_save: what a call leaves of its customers (needs prelude, bucket and customer).
local LEASE_SLACK_MS, LEASES_KEPT_MS = 500, 600000

-- hold_lease(c, id, deadline): it counts as under way until it ends, or a moment after its deadline.
local function hold_lease(c, id, deadline)
  local n = #c.entered
  c.used, c.entered[n + 1], c.entered[n + 2] = c.used + 1, decimal[deadline + LEASE_SLACK_MS], id
  if deadline > c.last then c.last = deadline end
end

local function save_customer(c)
  local fields = {'tokens', string.format('%.9f', c.tokens), 'at', string.format('%.0f', now_us), 'rate', c.rate}
  local keep_ms = kept_ms(c.tokens, c.burst, c.rate)
  if c.pace > 0 then
    local n = #fields
    fields[n + 1], fields[n + 2], fields[n + 3], fields[n + 4] = 'budget', string.format('%.6f', c.budget), 'pace', c.pace
    keep_ms = math.max(keep_ms, kept_ms(c.budget, c.pace, c.pace / 60))
  end
  for _, q in ipairs(c.quotas) do
    fields[#fields + 1] = 'q:' .. q.period
    fields[#fields + 1] = string.format('%.0f %.0f', q.number, q.spent)
    keep_ms = math.max(keep_ms, q.ends - now + 1000)
  end
  call('HSET', c.key, unpack(fields))
  outlive(c.key, keep_ms) -- a gateway that has not heard of a quota yet must not shorten its memory
end

-- note_rates(c, key, pool, tokens): those that changed since a bucket was written that is too empty now. What refuses is
-- not written, and would be taken to have filled at the rate of then all the while: hardly ever, where that was next to
-- nothing, or to the brim, when the rate comes back to it. This spends nothing, and is done once for each change.
local function note_rates(c, key, pool, tokens)
  for _, b in ipairs({pool, key}) do
    if b.moved and b.tokens < math.min(1, b.burst) then
      save_bucket(b)
      b.moved = false
    end
  end
  if c.moved and (c.tokens < math.min(1, c.burst) or c.budget < math.min(tokens, c.pace)) then
    save_customer(c)
    c.moved = false
  end
end

local function save_customers()
  for _, c in pairs(customers) do
    if c.spent then save_customer(c) end
    if #c.entered > 0 then
      if c.stale then call('ZREMRANGEBYSCORE', c.leases, '-inf', now) end
      call('ZADD', c.leases, unpack(c.entered))
      -- One that was put in before may last longer, and a job's much longer.
      outlive(c.leases, c.last - now + LEASE_SLACK_MS + LEASES_KEPT_MS)
    end
  end
end
