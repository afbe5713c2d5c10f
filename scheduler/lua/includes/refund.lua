-- refund: at the end of a request, releases its concurrency lease and refunds what it was charged but did not use (needs
-- prelude, row and metered). A failure of the service refunds everything: the request, its tokens, its use of each quota. A failure
-- caused by the client (cancelled, or a bad input) refunds what was not delivered: all tokens. For a stream that was partly
-- delivered before it failed, whatever the cause, the request and the delivered tokens are charged. So each charge is that of the
-- audit's row.
local CLIENT_FAULTS = {poison_request = true, invalid_request = true, cancelled = true, context_length_exceeded = true,
  request_too_large = true}
local released_leases, refunds = {}, {}

local function was_partly_delivered(state, used) return state == 'failed' and used > 0 end

-- bucket_costs(id, row, account) -> {level field, rate field, units, settled} of each bucket that was charged, except requests.
local NO_COSTS = {}
local function bucket_costs(id, row, account)
  if account.charged == 'all' then return {{'budget', 'pace', charged_tokens(row), true}} end
  if account.charged ~= 'listed' then return NO_COSTS end
  local costs, listed = {}, redis.pcall('HGET', P .. 'request:' .. id, 'charged')
  for level, rate, units, settled in string.gmatch(type(listed) == 'string' and listed or '', '(%S+) (%S+) (%d+) ([01])') do
    costs[#costs + 1] = {level, rate, tonumber(units), settled == '1'}
  end
  return costs
end

local function add_units(total, level, rate, units)
  local entry = total.units[level]
  if entry then entry[2] = entry[2] + units else total.units[level] = {rate, units} end
end

-- unused(units, used): of the units charged, those that were not used; all of them without `used`.
local function unused(units, used) return used and units - math.min(used, metered.MOST_TOKENS) or units end

local function total_of(customer)
  local total = refunds[customer] or {requests = 0, units = {}, windows = {}, keys = {}, cost_us = 0, costs = 0}
  refunds[customer] = total
  return total
end

-- settle_quotas(id, total, is_kept, used, cost_ms): the metered quotas of a request, in its row too, since it may be revoked.
local function settle_quotas(id, total, is_kept, used, cost_ms)
  local text = redis.pcall('HGET', P .. 'request:' .. id, 'charged')
  if type(text) ~= 'string' then return end
  local settled = metered.settle(text, is_kept, cost_ms and cost_ms * 1000, used, function(window, units)
    total.windows[window] = (total.windows[window] or 0) + units
  end)
  if settled ~= text then redis.pcall('HSET', P .. 'request:' .. id, 'charged', settled) end
end

-- refund_unmetered(id, row, account, state, code, used, sign): what a request that ends so is refunded of buckets and of quotas of
-- requests; with `sign` -1 it is charged again. `used` tokens: 0 or less if they were not counted; then the estimate of a
-- completed request stays charged.
local function refund_unmetered(id, row, account, state, code, used, sign)
  local is_charged = state == 'completed' or was_partly_delivered(state, used)
  if account.charged == 'nothing' or (is_charged and used <= 0) then return end
  local total, settled, is_kept = total_of(account.customer), is_charged and used, is_charged or CLIENT_FAULTS[code]
  if account.charged == 'all' then add_units(total, 'budget', 'pace', sign * unused(charged_tokens(row), settled)) -- without tables
  else
    for _, cost in ipairs(bucket_costs(id, row, account)) do
      if cost[4] or not is_kept then add_units(total, cost[1], cost[2], sign * unused(cost[3], settled)) end
    end
  end
  if is_kept then return end
  total.requests = total.requests + sign
  if account.key ~= '-' then total.keys[account.key] = (total.keys[account.key] or 0) + sign end
  for period, number in string.gmatch(account.windows, '(%S+) (%d+)') do
    local window = period .. ' ' .. number
    total.windows[window] = (total.windows[window] or 0) + sign
  end
end

-- refund(id, row, account, state, code, used, cost_ms): `cost_ms` of GPU time, nil if not measured: then only a completed request
-- pays it, as estimated.
local function refund(id, row, account, state, code, used, cost_ms)
  local ids = released_leases[account.customer]
  if ids then ids[#ids + 1] = id else released_leases[account.customer] = {id} end
  if state == 'completed' and account.charged == 'requests' then return end -- it was charged nothing that it has not used
  local is_charged = state == 'completed' or was_partly_delivered(state, used)
  if account.charged == 'listed' then
    local total, tokens = total_of(account.customer), 0
    if is_charged then tokens = used > 0 and used or nil end
    settle_quotas(id, total, is_charged or CLIENT_FAULTS[code], tokens, cost_ms or state ~= 'completed' and 0 or nil)
    if state == 'completed' and cost_ms and cost_ms > 0 then
      total.cost_us, total.costs = total.cost_us + cost_ms * 1000, total.costs + 1
    end
  end
  refund_unmetered(id, row, account, state, code, used, 1)
end

-- refund_bucket(key, level, amount, rate): `level` and `rate` are fields. Only if the field exists: a missing bucket is full, and
-- a new one would have no TTL. Errors are ignored from here on: the requests have ended, and a refund must not block replies.
local function refund_bucket(key, level, amount, rate)
  if amount == 0 or redis.pcall('HEXISTS', key, level) ~= 1 then return end
  local tokens = tonumber(redis.pcall('HINCRBYFLOAT', key, level, amount))
  if not tokens or tokens >= 0 or amount > 0 then return end
  -- A debt, which must not be cancelled by the expiry of the key: as ttl_ms in bucket.
  local keep_ms = math.ceil(math.min(604800000, 120000 * (1 - tokens / math.max(1, call('HGET', key, rate) or 1))))
  if call('PTTL', key) < keep_ms then call('PEXPIRE', key, keep_ms) end
end

-- refund_quota(key, window, count): only if `window` is still the current one.
local function refund_quota(key, window, count)
  local period, number = string.match(window, '^(%S+) (%d+)$')
  local row = redis.pcall('HGET', key, 'q:' .. period)
  local stored_number, spent = string.match(type(row) == 'string' and row or '', '^(%d+) (%d+)$')
  if stored_number == number then
    call('HSET', key, 'q:' .. period, stored_number .. ' ' .. string.format('%.0f', math.max(0, spent - count)))
  end
end

-- learn_cost(key, total): the mean GPU time of a customer's requests in this pool, the estimate of the next ones. Not in a new
-- hash, which would have no TTL.
local function learn_cost(key, total)
  if total.costs == 0 or redis.pcall('EXISTS', key) ~= 1 then return end
  local stored = redis.pcall('HGET', key, 'cost:' .. P)
  local known = metered.mean(type(stored) == 'string' and stored or nil)
  redis.pcall('HSET', key, 'cost:' .. P, metered.new_mean(known, total.cost_us, total.costs))
end

-- apply_refund(customer, total): as described at refund_bucket.
local function apply_refund(customer, total)
  local key = T .. 'rl:customer:' .. customer
  refund_bucket(key, 'tokens', total.requests, 'rate')
  for level, entry in pairs(total.units) do refund_bucket(key, level, entry[2], entry[1]) end
  for id, count in pairs(total.keys) do refund_bucket(T .. 'rl:key:' .. id, 'tokens', count, 'rate') end
  for window, count in pairs(total.windows) do refund_quota(key, window, count) end
  learn_cost(key, total)
end

local function apply_refunds()
  for customer, ids in pairs(released_leases) do
    for i = 1, #ids, 1000 do redis.pcall('ZREM', T .. 'rl:leases:' .. customer, unpack(ids, i, math.min(#ids, i + 999))) end
  end
  for customer, total in pairs(refunds) do apply_refund(customer, total) end
  released_leases, refunds = {}, {}
end
