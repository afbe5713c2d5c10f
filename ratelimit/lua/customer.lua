-- customer: what one customer may do now (needs prelude, bucket and quota): requests, model tokens, concurrency, quotas.
-- One hash a customer, read and written once a call, however many of its requests are in it. A lease a request, which
-- expires: a bare counter would be wrong for ever once somebody died. Expired ones are looked for where they matter only.
local customers = {}

-- recount(c): how many are under way, without the leases that have expired.
local function recount(c)
  c.stale, c.used = true, call('ZCOUNT', c.leases, '(' .. now, '+inf') + #c.entered / 2
  return c.used
end

-- customer(id, told): told = {rate, burst, tokens a minute, concurrency, {{period, amount}...}}, 0 where not limited.
local function customer(id, told)
  local c = customers[id]
  if c then return c end
  c = {key = 'rl:customer:' .. id, leases = 'rl:leases:' .. id, rate = told[1], burst = told[2], pace = told[3],
    most = told[4], quotas = {}, windows = '', used = 0, entered = {}, last = now}
  local fields = {'tokens', 'at', 'rate', 'budget', 'pace'}
  for i, q in ipairs(told[5]) do fields[5 + i] = 'q:' .. q[1] end
  local row = call('HMGET', c.key, unpack(fields))
  for i = 1, 5 do row[i] = tonumber(row[i]) end
  c.tokens = filled(row[1], row[2], row[3], c.rate, c.burst)
  c.budget = c.pace > 0 and filled(row[4], row[2], row[5] and row[5] / 60, c.pace / 60, c.pace) or 0
  for i, q in ipairs(told[5]) do
    local number, ends = window(q[1])
    local of, spent = string.match(row[5 + i] or '', '^(%d+) (%d+)$')
    c.quotas[i] = {period = q[1], amount = q[2], number = number, ends = ends, spent = tonumber(of) == number and tonumber(spent) or 0}
    c.windows = c.windows .. ' ' .. q[1] .. ' ' .. number
  end
  c.used = c.most > 0 and call('ZCARD', c.leases) or 0
  if c.most > 0 and c.used >= c.most then recount(c) end
  c.moved = moved(row[3], c.rate) or c.pace > 0 and moved(row[5], c.pace)
  customers[id] = c
  return c
end

-- refuse(c, tokens, count) -> which limit refuses so many requests of so many tokens in all, and ms until it would not; nil
-- where none does.
-- A request larger than a whole minute enters when the minute is whole: its debt keeps the next ones out.
local function refuse(c, tokens, count)
  if c.tokens < count then return 'customer_limit', ms_until(c.tokens, count, c.rate) end
  local wanted, ends = math.min(tokens, c.pace), nil
  if c.pace > 0 and c.budget < wanted then return 'token_limit', ms_until(c.budget, wanted, c.pace / 60) end
  if c.most > 0 and c.used + count > c.most and (c.stale or recount(c) + count > c.most) then return 'concurrency', 0 end
  for i = 1, #c.quotas do
    local q = c.quotas[i]
    if q.spent + count > q.amount then ends = math.max(ends or 0, q.ends) end
  end
  if ends then return 'quota', ends - now end
end

-- charge(c, tokens) -> what the request row remembers of it, for who settles: 'all', or 'requests' where no tokens are
-- counted. The windows of its quotas are the customer's, `c.windows`.
local function charge(c, tokens)
  c.tokens, c.spent = c.tokens - 1, true
  for i = 1, #c.quotas do c.quotas[i].spent = c.quotas[i].spent + 1 end
  if c.pace <= 0 then return 'requests' end
  c.budget = c.budget - tokens
  return 'all'
end
