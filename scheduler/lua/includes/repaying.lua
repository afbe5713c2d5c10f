-- repaying: at a request's end its lease goes, and what it was charged and did not use comes back (needs prelude and row).
-- A failure of ours gives back everything: the request, its tokens, its part of each quota. One that is the client's own
-- (it left, or its input breaks the model) gives back nothing. What a stream had delivered when it ran out of time, or
-- when its client left, is charged: the request, and the tokens used until then.
local THEIRS = {poison_request = true, invalid_request = true, cancelled = true}
local DELIVERED = {deadline_exceeded = true, cancelled = true} -- with tokens used: a part of a stream was delivered
local MOST_USED = 100 -- times the estimate: a backend that counts nonsense does not shut a customer out for days
local freed, back = {}, {}

-- delivered(state, code, used): whether a part of a stream was.
local function delivered(state, code, used) return state == 'failed' and used > 0 and DELIVERED[code] end

-- costs_of(id, row, p) -> {level field, rate field, units, settled} of each bucket that it was charged for, but that of requests.
local NO_COSTS = {}
local function costs_of(id, row, p)
  if p.paid == 'all' then return {{'budget', 'pace', tokens_of(row), true}} end
  if p.paid ~= 'listed' then return NO_COSTS end
  local costs, listed = {}, redis.pcall('HGET', P .. 'request:' .. id, 'charged')
  for level, rate, units, settled in string.gmatch(type(listed) == 'string' and listed or '', '(%S+) (%S+) (%d+) ([01])') do
    costs[#costs + 1] = {level, rate, tonumber(units), settled == '1'}
  end
  return costs
end

local function give_back(b, cost, units)
  local known = b.units[cost[1]]
  if known then known[2] = known[2] + units else b.units[cost[1]] = {cost[2], units} end
end

-- repay(id, row, whose, state, code, used) -> what its customer gets back in this call, nil where it gets nothing back for this
-- one. `used` tokens: 0 or less where nobody counted them, and the estimate stands.
local function repay(id, row, p, state, code, used)
  local ids, charged = freed[p.customer], state == 'completed' or delivered(state, code, used)
  if ids then ids[#ids + 1] = id else freed[p.customer] = {id} end
  if p.paid == 'nothing' or (charged and used <= 0) or (not charged and THEIRS[code]) then return end
  local b = back[p.customer] or {requests = 0, units = {}, windows = {}, keys = {}}
  back[p.customer] = b
  for _, cost in ipairs(costs_of(id, row, p)) do
    local units = cost[3]
    if not charged then give_back(b, cost, units)
    elseif cost[4] and units > 0 then give_back(b, cost, units - math.min(used, MOST_USED * units)) end
  end
  if charged then return b end
  b.requests = b.requests + 1
  if p.key ~= '-' then b.keys[p.key] = (b.keys[p.key] or 0) + 1 end
  for period, number in string.gmatch(p.windows, '(%S+) (%d+)') do
    local w = period .. ' ' .. number
    b.windows[w] = (b.windows[w] or 0) + 1
  end
  return b
end

-- add(key, field, amount, rate): only to what is there: a bucket that is gone is full, and a new one would have no TTL. `rate` is
-- the field of its rate. Errors are passed over from here on: the requests have ended, and no refund may hold back their answers.
local function add(key, field, amount, rate)
  if amount == 0 or redis.pcall('HEXISTS', key, field) ~= 1 then return end
  local sum = tonumber(redis.pcall('HINCRBYFLOAT', key, field, amount))
  if not sum or sum >= 0 or amount > 0 then return end
  -- A debt, of which the end of the key must not relieve anybody: as kept_ms of bucket.
  local keep_ms = math.ceil(math.min(604800000, 120000 * (1 - sum / math.max(1, call('HGET', key, rate) or 1))))
  if call('PTTL', key) < keep_ms then call('PEXPIRE', key, keep_ms) end
end

local function unspend(key, window, count) -- only where it still counts
  local period, number = string.match(window, '^(%S+) (%d+)$')
  local row = redis.pcall('HGET', key, 'q:' .. period)
  local of, spent = string.match(type(row) == 'string' and row or '', '^(%d+) (%d+)$')
  if of == number then call('HSET', key, 'q:' .. period, of .. ' ' .. string.format('%.0f', math.max(0, spent - count))) end
end

local function repay_all()
  for customer, ids in pairs(freed) do
    for i = 1, #ids, 1000 do redis.pcall('ZREM', 'rl:leases:' .. customer, unpack(ids, i, math.min(#ids, i + 999))) end
  end
  for customer, b in pairs(back) do
    local key = 'rl:customer:' .. customer
    add(key, 'tokens', b.requests, 'rate')
    for level, units in pairs(b.units) do add(key, level, units[2], units[1]) end
    for id, count in pairs(b.keys) do add('rl:key:' .. id, 'tokens', count, 'rate') end
    for w, count in pairs(b.windows) do unspend(key, w, count) end
  end
  freed, back = {}, {}
end
