-- repaying: at a request's end its lease goes, and what it was charged and did not use comes back (needs prelude).
-- A failure of ours gives back everything: the request, its tokens, its part of each quota. One that is the client's own
-- (it left, or its input breaks the model) gives back nothing.
local THEIRS = {poison_request = true, invalid_request = true, cancelled = true}
local freed, back = {}, {}

local function owed(customer)
  local b = back[customer] or {requests = 0, tokens = 0, windows = {}, keys = {}}
  back[customer] = b
  return b
end

-- repay(id, customer, paid, state, code, used): `paid` is what admission wrote, "<key or -> <tokens> <period> <window>...";
-- nothing was charged where there is none. `used` tokens: 0 or less where nobody counted them,
-- and the estimate stands.
local function repay(id, customer, paid, state, code, used)
  local ids = freed[customer] or {}
  freed[customer], ids[#ids + 1] = ids, id
  if not paid or paid == '' or (state == 'failed' and THEIRS[code]) then return end
  local key, tokens, windows = string.match(paid, '^(%S+) (%d+)(.*)$')
  if not key then return end -- of another version
  if state == 'completed' then
    if tonumber(tokens) > 0 and used > 0 then owed(customer).tokens = owed(customer).tokens + tokens - used end
    return
  end
  local b = owed(customer)
  b.requests, b.tokens = b.requests + 1, b.tokens + tokens
  if key ~= '-' then b.keys[key] = (b.keys[key] or 0) + 1 end
  for period, number in string.gmatch(windows, '(%S+) (%d+)') do
    local w = period .. ' ' .. number
    b.windows[w] = (b.windows[w] or 0) + 1
  end
end

-- add(key, field, amount): only to what is there; a bucket that is gone is full, and would stay without a TTL. Errors
-- are passed over from here on: the requests have ended, and nothing in the way of a refund may keep their answers back.
local function add(key, field, amount)
  if amount == 0 or redis.pcall('HEXISTS', key, field) ~= 1 then return end
  local sum, pace = tonumber(redis.pcall('HINCRBYFLOAT', key, field, amount)), tonumber(redis.call('HGET', key, 'pace'))
  if field ~= 'budget' or not (sum and pace and sum < 0 and pace > 0) then return end
  -- Who waits for the end of the key must not be rid of the debt: as in kept_ms of bucket.
  local keep_ms = math.ceil(math.min(604800000, 120000 * (1 - sum / pace)))
  if redis.call('PTTL', key) < keep_ms then redis.call('PEXPIRE', key, keep_ms) end
end

-- unspend(key, w, count): of a quota's window, where it is still the one that counts.
local function unspend(key, w, count)
  local period, number = string.match(w, '^(%S+) (%d+)$')
  local row = redis.pcall('HGET', key, 'q:' .. period)
  local of, spent = string.match(type(row) == 'string' and row or '', '^(%d+) (%d+)$')
  if of == number then redis.call('HSET', key, 'q:' .. period, of .. ' ' .. string.format('%.0f', math.max(0, spent - count))) end
end

local function repay_all()
  for customer, ids in pairs(freed) do
    for i = 1, #ids, 1000 do redis.pcall('ZREM', P .. 'rl:leases:' .. customer, unpack(ids, i, math.min(#ids, i + 999))) end
  end
  for customer, b in pairs(back) do
    local key = P .. 'rl:customer:' .. customer
    add(key, 'tokens', b.requests)
    add(key, 'budget', b.tokens)
    for id, count in pairs(b.keys) do add(P .. 'rl:key:' .. id, 'tokens', count) end
    for w, count in pairs(b.windows) do unspend(key, w, count) end
  end
  freed, back = {}, {}
end
