-- bucket: token buckets that keep their tokens when the rate changes (needs prelude).
-- Read once a call, spent in memory, written once a call by save_buckets(); one that was not spent is not written.
-- A missing bucket was idle long enough to be full, or Redis was lost: it counts as a quarter full at the epoch
-- (when this Redis was first used) and refilled since, so a lost Redis never hands everybody a full burst.
local FRESH = 0.25
local epoch_us = tonumber(redis.call('GET', P .. 'epoch'))
local buckets = {}

local function bucket(key, rate, burst)
  local b = buckets[key]
  if b then return b end
  local row = redis.call('HMGET', key, 'tokens', 'at')
  local tokens, at = tonumber(row[1]), tonumber(row[2])
  if not tokens or not at then tokens, at = burst * FRESH, epoch_us or now_us end
  local elapsed = math.max(0, now_us - at) / 1000000
  b = {tokens = math.min(burst, tokens + elapsed * rate), rate = rate, burst = burst, spent = false}
  buckets[key] = b
  return b
end

local function spend(b, cost)
  b.tokens, b.spent = b.tokens - cost, true
end

-- ms_until(b, tokens): how long until the bucket holds that many, capped at a day.
local function ms_until(b, tokens)
  if b.tokens >= tokens then return 0 end
  if b.rate <= 0 then return 86400000 end
  return math.min(86400000, math.ceil((tokens - b.tokens) / b.rate * 1000))
end

local function save_buckets()
  for key, b in pairs(buckets) do
    if b.spent then
      redis.call('HSET', key, 'tokens', string.format('%.6f', b.tokens), 'at', string.format('%.0f', now_us))
      redis.call('PEXPIRE', key, math.max(60000, 2 * ms_until(b, b.burst)))
    end
  end
end
