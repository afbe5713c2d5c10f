-- bucket: token buckets that keep their tokens when the rate changes (needs prelude).
-- Read once a call, spent in memory, written once a call by save_buckets(); one that was not spent is not written.
-- A missing bucket was idle long enough to be full, or Redis was lost: it counts as a quarter full at the epoch
-- (when this Redis was first used) and refilled since, so a lost Redis never hands everybody a full burst.
local FRESH = 0.25
local epoch_us = tonumber(redis.call('GET', P .. 'epoch'))
local buckets = {}

-- filled(tokens, at, was, rate, burst) -> tokens now. `was` is the rate when they were written: for the time since then
-- the lower of the two counts, so that neither raising a rate nor lowering it gives anything for the past.
local function filled(tokens, at, was, rate, burst)
  if not tokens or not at then tokens, at, was = burst * FRESH, epoch_us or now_us, rate end
  local elapsed = math.max(0, now_us - at) / 1000000
  return math.min(burst, tokens + elapsed * math.min(was or rate, rate))
end

-- ms_until(tokens, wanted, rate): how long until there are so many, capped at a day.
local function ms_until(tokens, wanted, rate)
  if tokens >= wanted then return 0 end
  if rate <= 0 then return 86400000 end
  return math.min(86400000, math.ceil((wanted - tokens) / rate * 1000))
end

local function bucket(key, rate, burst)
  local b = buckets[key]
  if b then return b end
  local row = redis.call('HMGET', key, 'tokens', 'at', 'rate')
  b = {tokens = filled(tonumber(row[1]), tonumber(row[2]), tonumber(row[3]), rate, burst), rate = rate, burst = burst}
  buckets[key] = b
  return b
end

local function spend(b)
  b.tokens, b.spent = b.tokens - 1, true
end

local function save_buckets()
  for key, b in pairs(buckets) do
    if b.spent then
      redis.call('HSET', key, 'tokens', string.format('%.6f', b.tokens), 'at', string.format('%.0f', now_us), 'rate', b.rate)
      redis.call('PEXPIRE', key, math.max(60000, 2 * ms_until(b.tokens, b.burst, b.rate)))
    end
  end
end
