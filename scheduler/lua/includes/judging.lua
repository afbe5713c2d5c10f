-- judging: which limit speaks first, and what a verdict tells (needs bucket, customer, customer_save and shedding).
-- judge(s, t, c, key, pool, capacity, run_ms) -> the limit that refuses, and ms until trying again pays; nil where none
-- does: the client's own limits first, then its tier's part of the capacity, then what waits.
local function limited(s, c, key, pool)
  if key and key.tokens < 1 then return 'key_limit', ms_until(key.tokens, 1, key.rate) end
  local limit, retry_ms = refuse(c, s[14])
  if limit then return limit, retry_ms end
  if pool.tokens < 1 then return 'tier_limit', ms_until(pool.tokens, 1, pool.rate) end
end

local function judge(s, t, c, key, pool, capacity, run_ms)
  local limit, retry_ms = limited(s, c, key, pool)
  if not limit then return shed(t, s[1], capacity, math.min(s[9], s[8] - run_ms)) end
  note_rates(c, key, pool, s[14])
  return limit, retry_ms
end

-- verdict(...): requests are told by the bucket that holds fewer, the customer's or the key's own.
local function verdict(outcome, c, key, retry_ms, waiting, stored_id, shadowed)
  local b = key and key.tokens < c.tokens and key or c
  local quotas = {}
  for i, q in ipairs(c.quotas) do quotas[i] = {math.max(0, q.amount - q.spent), q.ends - now} end
  return {outcome, math.max(0, b.tokens), ms_until(b.tokens, b.burst, b.rate), retry_ms, waiting, stored_id or '',
    c.budget, c.pace > 0 and ms_until(c.budget, c.pace, c.pace / 60) or 0, c.used, quotas, shadowed or ''}
end
