-- bucket: token buckets that keep their tokens when the rate changes (needs prelude).
-- Read once a call, spent in memory, written once a call by save_buckets(); one that was not spent is not written.
-- A missing bucket was idle long enough to be full, or Redis was lost: it counts as a quarter full at the epoch
-- (when this Redis was first used) and refilled since, so a lost Redis never hands everybody a full burst.
local FRESH, BACK_US = 0.25, 1000000
local LEAST_KEPT_MS, MOST_KEPT_MS = 3600000, 604800000 -- the least: a rate that falls later must find what was spent
local epoch_us = tonumber(call('GET', P .. 'epoch'))
local buckets = {}

-- filled(tokens, at, was, rate, burst) -> tokens now. `was` is the rate when they were written: for the time since then
-- the lower of the two counts, so that no change of a rate gives anything for the past. One that was written in the
-- future (TIME went back) would not fill for as long: it counts as lost.
local function filled(tokens, at, was, rate, burst)
  if not tokens or not at then tokens, at, was = burst * FRESH, epoch_us or now_us, rate end
  if at > now_us + BACK_US then tokens = math.max(tokens, burst * FRESH) end
  local elapsed = math.max(0, now_us - at) / 1000000
  return math.min(burst, tokens + elapsed * math.min(was or rate, rate))
end

-- ms_until(tokens, wanted, rate): how long until there are so many, capped at a day.
local function ms_until(tokens, wanted, rate)
  if tokens >= wanted then return 0 end
  if rate <= 0 then return 86400000 end
  return math.min(86400000, math.ceil((wanted - tokens) / rate * 1000))
end

-- moved(was, rate): whether it is another rate; gateways that relax limits differ by a little all the time.
local function moved(was, rate) return was and math.abs(was - rate) > rate / 100 end

-- kept_ms(...): twice the time until full, within bounds.
local function kept_ms(tokens, burst, rate)
  if rate <= 0 then return MOST_KEPT_MS end
  return math.ceil(math.max(LEAST_KEPT_MS, math.min(MOST_KEPT_MS, (burst - tokens) / rate * 2000)))
end

local function bucket(key, rate, burst)
  local b = buckets[key]
  if b then return b end
  local row = call('HMGET', key, 'tokens', 'at', 'rate')
  local was = tonumber(row[3])
  b = {key = key, tokens = filled(tonumber(row[1]), tonumber(row[2]), was, rate, burst), rate = rate, burst = burst}
  b.moved, buckets[key] = moved(was, rate), b
  return b
end

local function spend(b) b.tokens, b.spent = b.tokens - 1, true end

local function save_bucket(b)
  local tokens, at = string.format('%.9f', b.tokens), string.format('%.0f', now_us)
  call('HSET', b.key, 'tokens', tokens, 'at', at, 'rate', b.rate)
  outlive(b.key, kept_ms(b.tokens, b.burst, b.rate))
end

local function save_buckets()
  for _, b in pairs(buckets) do if b.spent then save_bucket(b) end end
end
