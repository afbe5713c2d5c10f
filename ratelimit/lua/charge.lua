-- charge: what one call of admit takes from its customers (needs prelude, bucket, customer and asking).
local LEASE_SLACK_MS, LEASES_KEPT_MS = 500, 600000

-- cost(b, i, o, count, sums): units of bucket i that a submission costs, or `count` of them that enter together, whose sums are
-- given then.
local function cost(b, i, o, count, sums)
  if b.cost == 0 then return count end
  return sums and sums[i] or asked[o + b.cost]
end

-- refuse(c, o, count, sums) -> the outcome that rejects, and ms until it would not; nil where none does.
-- A request larger than a whole bucket enters when the bucket is full: its debt keeps the next ones out.
local function refuse(c, o, count, sums)
  local ends
  for i = 1, #c.buckets do
    local b = c.buckets[i]
    local wanted = cost(b, i, o, count, sums)
    if b.cost ~= 0 and wanted > b.burst then wanted = b.burst end
    if b.tokens < wanted then return b.kind[1], ms_until(b.tokens, wanted, b.rate) end
  end
  if c.most > 0 and c.used + count > c.most and (c.stale or recount(c) + count > c.most) then return 'concurrency', 0 end
  for i = 1, #c.quotas do
    local q = c.quotas[i]
    if q.spent + count > q.amount then ends = math.max(ends or 0, q.ends) end
  end
  if ends then return 'quota', ends - now end
end

-- charge(c, o) -> what the request's row remembers of it, for the refund: 'requests', 'all' (and tokens), or 'listed', where
-- `charged` of the row has the cost of each bucket by its number. The windows of its quotas are the customer's, `c.windows`.
local function charge(c, o)
  local paid = 'requests'
  c.spent = true
  for i = 1, #c.buckets do
    local b = c.buckets[i]
    if b.cost == 0 then b.tokens = b.tokens - 1
    else
      b.tokens = b.tokens - asked[o + b.cost]
      paid = b.kind[6] and paid ~= 'listed' and 'all' or 'listed'
    end
  end
  for i = 1, #c.quotas do c.quotas[i].spent = c.quotas[i].spent + 1 end
  return paid
end

-- charged(c, o) -> "<level field> <rate field> <units> <settled>" of each bucket but that of requests, for `charged` of a row.
local function charged(c, o)
  local parts = {}
  for i = 1, #c.buckets do
    local b = c.buckets[i]
    if b.cost ~= 0 then
      parts[#parts + 1] = table.concat({b.kind[2], b.kind[3], decimal[asked[o + b.cost]], b.kind[6] and 1 or 0}, ' ')
    end
  end
  return table.concat(parts, ' ')
end

-- settle_charge(c, o, used): the request has ended, and used so many tokens.
local MOST_USED = 100 -- times the estimate, as in repaying
local function settle_charge(c, o, used)
  for i = 1, #c.buckets do
    local b = c.buckets[i]
    local units = b.kind[6] and asked[o + b.cost] or 0
    if units > 0 then b.tokens = b.tokens + units - math.min(used, MOST_USED * units) end
  end
end

-- hold_lease(c, id, deadline): it counts as under way until it ends, or a moment after its deadline.
local function hold_lease(c, id, deadline)
  local n = #c.entered
  c.used, c.entered[n + 1], c.entered[n + 2] = c.used + 1, decimal[deadline + LEASE_SLACK_MS], id
  if deadline > c.last then c.last = deadline end
end

local function save_customer(c)
  local fields, n, keep_ms = {'at', string.format('%.0f', now_us)}, 2, 0
  for i = 1, #c.buckets do
    local b = c.buckets[i]
    fields[n + 1], fields[n + 2], fields[n + 3], fields[n + 4] = b.kind[2], string.format('%.9f', b.tokens), b.kind[3], b.told
    n, keep_ms = n + 4, math.max(keep_ms, kept_ms(b.tokens, b.burst, b.rate))
  end
  for _, q in ipairs(c.quotas) do
    fields[n + 1], fields[n + 2], n = 'q:' .. q.period, string.format('%.0f %.0f', q.number, q.spent), n + 2
    keep_ms = math.max(keep_ms, q.ends - now + 1000)
  end
  call('HSET', c.key, unpack(fields))
  outlive(c.key, keep_ms) -- a gateway that does not know of a quota yet must not shorten its memory
end

-- note_rates(c, key, pool, o, count, sums): the rates that changed since a bucket was written that holds too little now. A
-- bucket that rejects is not written, and would be taken to have filled at the old rate all the while: hardly ever, where that
-- was close to 0, or to the brim, when the rate returns to it. This spends nothing, and is done once for each change.
local function note_rates(c, key, pool, o, count, sums)
  for _, b in ipairs({pool, key}) do
    if b.moved and b.tokens < math.min(1, b.burst) then
      save_bucket(b)
      b.moved = false
    end
  end
  if not c.moved then return end
  for i = 1, #c.buckets do
    local b = c.buckets[i]
    if b.tokens < math.min(b.cost == 0 and 1 or cost(b, i, o, count, sums), b.burst) then
      save_customer(c)
      c.moved = false
      return
    end
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
