-- bucket: token buckets that keep their tokens when the rate changes (needs prelude).
-- Read once per call, changed in memory, and written once per call by save_buckets() if tokens were taken.
-- A missing bucket was idle long enough to be full, or Redis lost it. It counts as a quarter full at the epoch (when this Redis
-- was first used) and refilled since, so that a loss of Redis does not give every customer a full burst.
local FRESH, FUTURE_US = 0.25, 1000000
local MIN_TTL_MS, MAX_TTL_MS = 3600000, 604800000 -- the minimum: if the rate is reduced later, the spent tokens are still known
local epoch_us = tonumber(call('GET', P .. 'epoch'))
local buckets = {}

-- refilled(tokens, updated_at, old_rate, rate, burst) -> tokens now. `old_rate` is the rate when they were written. Since then
-- the lower of the two rates counts, so that a changed rate adds nothing for the past. A bucket that was written in the future
-- (TIME went back) would not refill for as long: it counts as missing.
local function refilled(tokens, updated_at, old_rate, rate, burst)
  if not tokens or not updated_at then tokens, updated_at, old_rate = burst * FRESH, epoch_us or now_us, rate end
  if updated_at > now_us + FUTURE_US then tokens = math.max(tokens, burst * FRESH) end
  local elapsed = math.max(0, now_us - updated_at) / 1000000
  return math.min(burst, tokens + elapsed * math.min(old_rate or rate, rate))
end

-- ms_until(tokens, wanted, rate): ms until there are `wanted` tokens, at most a day.
local function ms_until(tokens, wanted, rate)
  if tokens >= wanted then return 0 end
  if rate <= 0 then return 86400000 end
  return math.min(86400000, math.ceil((wanted - tokens) / rate * 1000))
end

-- rate_changed(old_rate, rate): by more than 1 %; gateways that adapt limits always differ by a little.
local function rate_changed(old_rate, rate) return old_rate and math.abs(old_rate - rate) > rate / 100 end

-- ttl_ms(...): twice the time until the bucket is full, within bounds.
local function ttl_ms(tokens, burst, rate)
  if rate <= 0 then return MAX_TTL_MS end
  return math.ceil(math.max(MIN_TTL_MS, math.min(MAX_TTL_MS, (burst - tokens) / rate * 2000)))
end

local function bucket(key, rate, burst)
  local b = buckets[key]
  if b then return b end
  local row = call('HMGET', key, 'tokens', 'at', 'rate')
  local old_rate = tonumber(row[3])
  b = {key = key, tokens = refilled(tonumber(row[1]), tonumber(row[2]), old_rate, rate, burst), rate = rate, burst = burst}
  b.rate_changed, buckets[key] = rate_changed(old_rate, rate), b
  return b
end

local function spend(b, count) b.tokens, b.spent = b.tokens - (count or 1), true end

local function save_bucket(b)
  local tokens, updated_at = string.format('%.9f', b.tokens), string.format('%.0f', now_us)
  call('HSET', b.key, 'tokens', tokens, 'at', updated_at, 'rate', b.rate)
  extend_ttl(b.key, ttl_ms(b.tokens, b.burst, b.rate), SLACK)
end

local function save_buckets()
  for _, b in pairs(buckets) do if b.spent then save_bucket(b) end end
end
