-- customer: the limits of one customer and what is left of them (needs prelude, bucket and quota): token buckets,
-- concurrency, quotas. One hash a customer, read and written once a call, however many of its requests are in it. A lease a
-- request, which expires: a bare counter would stay wrong once a process died. Expired ones are removed only where they count.
-- kinds: BUCKETS of ratelimit/limits.py, {outcome, level field, rate field, period in s, position of the cost, settled} each.
local customers, kinds = {}, {}
local LEVEL, ONE_LEVEL, NO_QUOTAS = '>BBdBI4', 146, '\144' -- msgpack of {double, uint32}

-- recount(c): how many are under way, without the leases that have expired.
local function recount(c)
  c.stale, c.used = true, call('ZCOUNT', c.leases, '(' .. now, '+inf') + #c.entered / 2
  return c.used
end

-- customer(id, limits): limits = {{{number of the kind, rate, size}...}, concurrency (0 = not limited), {{period, amount}...}}.
local function customer(id, limits)
  local c = customers[id]
  if c then return c end
  c = {key = 'rl:customer:' .. id, leases = 'rl:leases:' .. id, buckets = {}, most = limits[2], quotas = {}, windows = '',
    used = 0, entered = {}, last = now}
  local fields, n = {'at'}, 1
  for _, b in ipairs(limits[1]) do
    fields[n + 1], fields[n + 2], n = kinds[b[1]][2], kinds[b[1]][3], n + 2
  end
  for i, q in ipairs(limits[3]) do fields[n + i] = 'q:' .. q[1] end
  local row = call('HMGET', c.key, unpack(fields))
  local at = tonumber(row[1])
  for i, b in ipairs(limits[1]) do
    local kind, rate, size, was = kinds[b[1]], b[2], b[3], tonumber(row[2 * i + 1])
    local per_s = rate / kind[4]
    c.buckets[i] = {kind = kind, rate = per_s, burst = size, told = rate, cost = kind[5],
      tokens = filled(tonumber(row[2 * i]), at, was and was / kind[4], per_s, size)}
    c.moved = c.moved or moved(was, rate)
  end
  for i, q in ipairs(limits[3]) do
    local number, ends = window(q[1])
    local of, spent = string.match(row[n + i] or '', '^(%d+) (%d+)$')
    c.quotas[i] = {period = q[1], amount = q[2], number = number, ends = ends, spent = tonumber(of) == number and tonumber(spent) or 0}
    c.windows = c.windows .. ' ' .. q[1] .. ' ' .. number
  end
  c.used = c.most > 0 and call('ZCARD', c.leases) or 0
  if c.most > 0 and c.used >= c.most then recount(c) end
  customers[id] = c
  return c
end

-- level(b, own) -> {left, ms until full} of a bucket, packed. Of requests it is that of `own`, the key's bucket, where that
-- holds less, and never below 0.
local function level(b, own)
  if b.cost == 0 and own and own.tokens < b.tokens then b = own end
  local left = (b.cost or 0) == 0 and b.tokens < 0 and 0 or b.tokens
  return struct.pack(LEVEL, ONE_LEVEL, 203, left, 206, ms_until(b.tokens, b.burst, b.rate))
end

-- remaining(c, own) -> `RemainingLimits`, packed.
local function remaining(c, own)
  local b, levels, quotas = c.buckets, '\144', NO_QUOTAS
  if #b == 1 then levels = '\145' .. level(b[1], own)
  elseif #b == 2 then levels = '\146' .. level(b[1], own) .. level(b[2], own)
  elseif #b > 2 then
    local parts = {}
    for i = 1, #b do parts[i] = level(b[i], own) end
    levels = array(parts)
  end
  if c.quotas[1] then
    quotas = {}
    for i, q in ipairs(c.quotas) do quotas[i] = {math.max(0, q.amount - q.spent), q.ends - now} end
    quotas = cmsgpack.pack(quotas)
  end
  return '\147' .. levels .. struct.pack('>BI4', 206, c.used) .. quotas
end
