-- customer: the limits of one customer and what is left of them (needs prelude, bucket, quota and share): token buckets, concurrency,
-- quotas. One hash per customer, read and written once per call for all of its requests. Concurrency is counted by leases,
-- which expire, because a counter would stay wrong after a crash. Expired leases are removed only if the limit is reached.
-- bucket_kinds: BUCKETS of ratelimit/limits.py, {outcome, level field, rate field, period in s, index of the cost, settled} each.
local customers, bucket_kinds = {}, {}
-- count_leases(c): the number of requests in progress, without expired leases.
local function count_leases(c)
  c.counted, c.in_use = true, call('ZCOUNT', c.leases, '(' .. now, '+inf') + #c.new_leases / 2
  return c.in_use
end

-- set_parts(c, parts): the concurrency of a customer of several cells. It is `closed` if it may use nothing here.
local function set_parts(c, parts)
  if c.max_concurrency > 0 then
    c.max_concurrency = math.floor(share.of(c.max_concurrency, parts[2]))
    c.closed = c.max_concurrency == 0
  end
  c.closed = c.closed or parts[1] == 0
  if c.closed then c.rate_changed = false end
end

-- read_quota(c, q, zone, stored): the quota `q` = {name, amount} of the customer or of one of its keys, whose name has an @.
local function read_quota(c, q, zone, stored)
  local name, amount = q[1], q[2]
  local number, ends_at, spent = window(name, zone, stored)
  local quota = {period = name, amount = amount, number = number, ends_at = ends_at, spent = spent, unit = string.match(name, ':(%a+)')}
  if c.parts then
    quota.amount, quota.others = share.granted(call('HGET', c.key, 'g:' .. name), number, amount, c.parts[3], spent)
  end
  c.quotas[name] = quota
  return quota
end

-- quotas_of(c, limits) -> {its quotas and those of the key that `limits` are of, in order; metered: whether one is;
-- windows: " <name> <number>" of each that is not}.
local function quotas_of(c, limits)
  local found = {windows = ''}
  for i, q in ipairs(limits[3]) do
    local quota = c.quotas[q[1]] or read_quota(c, q, limits[8], call('HGET', c.key, 'q:' .. q[1]))
    found[i] = quota
    if quota.unit then found.metered = true else found.windows = found.windows .. ' ' .. q[1] .. ' ' .. quota.number end
  end
  if found.metered and c.gpu_us == nil then c.gpu_us = metered.mean(call('HGET', c.key, 'cost:' .. P) or nil) or false end
  return found
end

-- customer(id, limits): limits = {{{kind, rate, size}...}, concurrency (0 = no limit), {{name, amount}...}, weight, meter if a
-- quota is metered: Meter of ratelimit/quotas.py, weight of the key, number of cells if several, time zone of its quotas as in quota,
-- if not UTC}; `kind` is an index. The quotas may be different for each key: `quotas` has those of all keys in this call by name.
-- `gpu_us`: the mean GPU time of its requests in this pool, false if it is not known. `home`: "<here|left> <version> <ms>" where
-- there are several cells; ms is 0 if no other cell knew the customer.
local function customer(id, limits)
  local c = customers[id]
  if c then return c end
  c = {key = T .. 'rl:customer:' .. id, leases = T .. 'rl:leases:' .. id, buckets = {}, max_concurrency = limits[2], quotas = {},
    in_use = 0, new_leases = {}, last_deadline = now, weight = limits[4] or 1}
  local fields, n = {'at', 'share'}, 2
  for _, b in ipairs(limits[1]) do
    fields[n + 1], fields[n + 2], n = bucket_kinds[b[1]][2], bucket_kinds[b[1]][3], n + 2
  end
  for i, q in ipairs(limits[3]) do fields[n + i] = 'q:' .. q[1] end
  if limits[5] then fields[n + #limits[3] + 1] = 'cost:' .. P end
  fields[#fields + 1] = 'home'
  local row = call('HMGET', c.key, unpack(fields))
  local updated_at, parts = tonumber(row[1]), share.read(row[2])
  if parts then c.asked = 0 elseif limits[7] then parts = share.NONE end
  for i, b in ipairs(limits[1]) do
    local kind, rate, size, old_rate = bucket_kinds[b[1]], b[2], b[3], tonumber(row[2 * i + 2])
    if parts then rate, size = share.of(rate, parts[1]), share.of(size, parts[1]) end
    local per_s = rate / kind[4]
    c.buckets[i] = {kind = kind, rate = per_s, burst = size, period_rate = rate, cost = kind[5],
      tokens = refilled(tonumber(row[2 * i + 1]), updated_at, old_rate and old_rate / kind[4], per_s, size)}
    c.rate_changed = c.rate_changed or rate_changed(old_rate, rate)
  end
  c.parts = parts
  for i, q in ipairs(limits[3]) do read_quota(c, q, limits[8], row[n + i]) end
  c.home = row[#fields]
  if limits[5] then c.gpu_us = metered.mean(row[n + #limits[3] + 1] or nil) or false end
  if parts then set_parts(c, parts) end
  c.in_use = c.max_concurrency > 0 and call('ZCARD', c.leases) or 0
  if c.max_concurrency > 0 and c.in_use >= c.max_concurrency then count_leases(c) end
  customers[id] = c
  return c
end

-- remaining(c, key, quotas) -> `RemainingLimits`: {{left, ms until full} of each bucket}, requests in progress, {{left, ms until the
-- next window} of each of `quotas`}. Requests: the level of the key's bucket `key` if that is lower, and never below 0.
local function remaining(c, key, quotas)
  local levels, left_of = {}, {}
  for i, b in ipairs(c.buckets) do
    local left = b.tokens
    if b.cost == 0 then
      if key and key.tokens < left then b, left = key, key.tokens end
      left = math.max(0, left)
    end
    levels[i] = {left, ms_until(b.tokens, b.burst, b.rate)}
  end
  for i, q in ipairs(quotas) do left_of[i] = {math.max(0, q.amount - q.spent), q.ends_at - now} end
  return {levels, c.in_use, left_of}
end
