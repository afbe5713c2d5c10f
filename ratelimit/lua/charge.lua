-- charge: what a call of admit charges to its customers (needs prelude, metered, bucket, customer and submissions).
local LEASE_SLACK_MS = 500

-- cost(b, i, o, count, sums): units of bucket i that a submission costs; with `sums`, the cost of `count` submissions that are
-- admitted together.
local function cost(b, i, o, count, sums)
  if b.cost == 0 then return count end
  return sums and sums[i] or submissions[o + b.cost]
end

-- check_customer(g, o, count, sums) -> the outcome that rejects, and ms until it would not; nil if no limit rejects.
-- A request larger than a whole bucket is accepted if the bucket is full; its debt rejects the next ones. A quota has to have
-- room for the whole estimate; `g.refused_by` names those without.
local function check_customer(g, o, count, sums)
  local c, ends_at, names, tokens = g.customer, nil, nil, sums and sums.tokens or submissions[o + TOKENS]
  if c.closed then return bucket_kinds[1][1], share.RETRY_MS end
  for i = 1, #c.buckets do
    local b = c.buckets[i]
    local wanted = b.cost == 0 and count or math.min(cost(b, i, o, count, sums), b.burst)
    if b.tokens < wanted then return b.kind[1], ms_until(b.tokens, wanted, b.rate) end
  end
  if c.max_concurrency > 0 and c.in_use + count > c.max_concurrency and
    (c.counted or count_leases(c) + count > c.max_concurrency) then return 'concurrency', 0 end
  for i = 1, #g.quotas do
    local q = g.quotas[i]
    if q.spent + metered.cost(c, q, count, tokens, g.meter) > q.amount then
      ends_at, names = math.max(ends_at or 0, q.others and now + share.RETRY_MS or q.ends_at), names and names .. ' ' .. q.period or q.period
    end
  end
  if not ends_at then return end
  g.refused_by = names
  return 'quota', ends_at - now
end

-- charged_kind(g) -> what rows store for the refund: 'requests', 'all' (one request and its tokens), or 'listed': then the field
-- `charged` has the cost of each bucket and metered quota. The windows of quotas of requests are in `g.quotas.windows`.
local function charged_kind(g)
  local charged = g.quotas.metered and 'listed' or 'requests'
  for _, b in ipairs(g.customer.buckets) do
    if b.cost ~= 0 then charged = b.kind[6] and charged ~= 'listed' and 'all' or 'listed' end
  end
  return charged
end

-- charge(g, o) -> charged_kind(g)
local function charge(g, o)
  local c = g.customer
  c.spent, g.charged = true, g.charged or charged_kind(g)
  for i = 1, #c.buckets do
    local b = c.buckets[i]
    b.tokens = b.tokens - (b.cost == 0 and 1 or submissions[o + b.cost])
  end
  for i = 1, #g.quotas do
    local q = g.quotas[i]
    q.spent = q.spent + metered.cost(c, q, 1, submissions[o + TOKENS], g.meter)
  end
  return g.charged
end

-- charged_field(g, o) -> the field `charged`: "<level> <rate> <units> <settled>" of each bucket but that of requests, and metered quotas.
local function charged_field(g, o)
  local parts, c = {}, g.customer
  for i = 1, #c.buckets do
    local b = c.buckets[i]
    if b.cost ~= 0 then
      parts[#parts + 1] = table.concat({b.kind[2], b.kind[3], decimal[submissions[o + b.cost]], b.kind[6] and 1 or 0}, ' ')
    end
  end
  if g.quotas.metered then parts[#parts + 1] = metered.field(c, g.quotas, submissions[o + TOKENS], g.meter) end
  return table.concat(parts, ' ')
end

-- settle_charge(g, o, used): the request has ended with a cached result, and used that many tokens and no GPU time.
local function settle_charge(g, o, used)
  local c, meter, tokens = g.customer, g.meter, submissions[o + TOKENS]
  for _, q in ipairs(g.quotas.metered and g.quotas or {}) do
    local reserved = metered.cost(c, q, 1, tokens, meter)
    local final = q.unit and metered.units(q.unit, 0, used > 0 and used or tokens, meter[2], meter[3]) or reserved
    q.spent = q.spent + final - reserved
  end
  if used <= 0 then return end
  for i = 1, #c.buckets do
    local b = c.buckets[i]
    local units = b.kind[6] and submissions[o + b.cost] or 0
    if units > 0 then b.tokens = b.tokens + units - math.min(used, metered.MOST_TOKENS) end
  end
end

-- add_lease(c, id, deadline): the request counts as in progress until it ends, or until shortly after its deadline.
local function add_lease(c, id, deadline)
  local leases = c.new_leases
  local n = #leases
  c.in_use, leases[n + 1], leases[n + 2] = c.in_use + 1, decimal[deadline + LEASE_SLACK_MS], id
  if deadline > c.last_deadline then c.last_deadline = deadline end
end

local function save_customer(c)
  local fields, n, keep_ms = {'at', string.format('%.0f', now_us)}, 2, c.keep_ms or 0
  for i = 1, #c.buckets do
    local b = c.buckets[i]
    fields[n + 1], fields[n + 2], fields[n + 3], fields[n + 4] =
      b.kind[2], string.format('%.9f', b.tokens), b.kind[3], b.period_rate
    n, keep_ms = n + 4, math.max(keep_ms, ttl_ms(b.tokens, b.burst, b.rate))
  end
  for _, q in pairs(c.quotas) do
    fields[n + 1], fields[n + 2], n = 'q:' .. q.period, string.format('%.0f %.0f', q.number, q.spent), n + 2
    keep_ms = math.max(keep_ms, q.ends_at - now + 1000)
  end
  call('HSET', c.key, unpack(fields))
  extend_ttl(c.key, keep_ms, SLACK) -- a gateway that does not know a new quota yet must not shorten its lifetime
end

-- save_changed_rates(c, key, tier_bucket, o, count, sums): a bucket that rejects is not written. If its rate changed since it was
-- written, it would later count as refilled at the old rate: hardly at all, if that was close to 0, or completely, when the rate
-- returns to it. So the new rate is written, once per change. Nothing is charged.
local function save_changed_rates(c, key, tier_bucket, o, count, sums)
  for _, b in ipairs({tier_bucket, key}) do
    if b.rate_changed and b.tokens < math.min(1, b.burst) then
      save_bucket(b)
      b.rate_changed = false
    end
  end
  if not c.rate_changed then return end
  for i = 1, #c.buckets do
    local b = c.buckets[i]
    if b.tokens < math.min(b.cost == 0 and 1 or cost(b, i, o, count, sums), b.burst) then
      save_customer(c)
      c.rate_changed = false
      return
    end
  end
end

-- save_demand(): how many requests arrived here from customers of several cells, for the parts of their limits.
local function save_demand()
  for _, c in pairs(customers) do if (c.asked or 0) > 0 then call('HINCRBYFLOAT', c.key, 'asked', c.asked) end end
end

local function save_customers()
  local LEASES_KEEP_MS = 600000
  for _, c in pairs(customers) do
    if c.spent then save_customer(c) end
    if #c.new_leases > 0 then
      if c.counted then call('ZREMRANGEBYSCORE', c.leases, '-inf', now) end
      call('ZADD', c.leases, unpack(c.new_leases))
      -- Earlier leases may last longer, those of jobs much longer.
      extend_ttl(c.leases, c.last_deadline - now + LEASE_SLACK_MS + LEASES_KEEP_MS)
    end
  end
end
