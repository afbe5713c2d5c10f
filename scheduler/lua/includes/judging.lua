-- judging: which limit speaks first, and what a verdict tells (needs bucket, customer, customer_save and shedding).
-- judge(id, g, tokens, capacity, longest_ms, count, shared) -> the limit that refuses so many requests with so many tokens in
-- all, and ms until trying again pays; nil where none does: the client's own limits first, then its tier's part of the
-- capacity, then what waits; these two ask nothing of one that is `shared`, for which no GPU works.
local function limited(g, tokens, count, shared)
  local key, pool = g.key, g.pool
  if key and key.tokens < count then return 'key_limit', ms_until(key.tokens, count, key.rate) end
  local limit, retry_ms = refuse(g.customer, tokens, count)
  if limit then return limit, retry_ms end
  local wanted = math.max(1, math.min(count, pool.burst)) -- more enter when it is full: their debt keeps the next ones out
  if not shared and pool.tokens < wanted then return 'tier_limit', ms_until(pool.tokens, wanted, pool.rate) end
end

local function judge(id, g, tokens, capacity, longest_ms, count, shared)
  local limit, retry_ms = limited(g, tokens, count, shared)
  if not limit and shared then return end
  if not limit then return shed(g.tier, id, capacity, longest_ms) end
  note_rates(g.customer, g.key, g.pool, tokens)
  return limit, retry_ms
end

-- standing(c, key) -> requests left and ms until all are, the same of tokens, how many are under way, and what is left of
-- each quota, nil where there is none. Requests are told by the bucket that holds fewer, the customer's or the key's own.
local function standing(c, key)
  local b, quotas, pace = key and key.tokens < c.tokens and key or c, nil, c.pace
  if c.quotas[1] then
    quotas = {}
    for i, q in ipairs(c.quotas) do quotas[i] = {math.max(0, q.amount - q.spent), q.ends - now} end
  end
  return b.tokens > 0 and b.tokens or 0, ms_until(b.tokens, b.burst, b.rate), c.budget,
    pace > 0 and ms_until(c.budget, pace, pace / 60) or 0, c.used, quotas
end
