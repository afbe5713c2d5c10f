-- shedding: which requests are rejected before the queue, lowest tier first, with a rising probability (needs prelude).
-- `depth`: queued requests per tier; `t`: the limits of a tier.
local depth = {}

-- scheduler_is_paused(pass_ms): whether requests wait because no scheduler forms batches, not because the GPUs are busy. Then the
-- queue says nothing about capacity, and no tier is shed by depth; predicted wait and maximum depth still apply. So it is while
-- `resumed_at` exists, for a second after a long pause: what has waited is still leaving. Bounded: a scheduler, or a gateway in its
-- place, runs again within PAUSE_MAX_MS, or the depth counts again.
local function scheduler_is_paused(pass_ms)
  local MISSED_PASSES, PAUSE_MAX_MS = 2.5, 2000
  local last_pass = tonumber(redis.pcall('GET', P .. 'reaped_at'))
  local late_ms = last_pass and now - last_pass - MISSED_PASSES * pass_ms or 0
  return late_ms > 0 and late_ms < PAUSE_MAX_MS or redis.pcall('EXISTS', P .. 'resumed_at') == 1
end

-- requests_ahead(t, own) -> at most how many requests run before the next one of this tier: `own` that are queued in it and all
-- in higher tiers or, with a guaranteed share of the capacity, its own requests at the rate of that share. `own` is less than the
-- depth for a customer whose share of the tier is larger than its part of the queue.
local function requests_ahead(t, own)
  local ahead = own - depth[t.name]
  for i = 1, #t.ahead do ahead = ahead + (depth[t.ahead[i]] or 0) end
  return t.share > 0 and math.min(ahead, own / t.share) or ahead
end

-- service_rate(t, capacity) -> requests/s of this tier that are served while it has a queue, whatever other tiers demand.
local function service_rate(t, capacity)
  return math.max(math.min(t.rate, capacity), t.share * capacity, 0.001)
end

-- predicted_wait_ms(t, capacity, own) -> the wait of the next request of this tier: for requests of higher tiers, and for its own queue
-- at its service rate; at most for its own queue at the rate of its guaranteed share. 0 if the capacity is unknown.
local function predicted_wait_ms(t, capacity, own)
  if capacity <= 0 then return 0 end
  local ahead = -depth[t.name]
  for i = 1, #t.ahead do ahead = ahead + (depth[t.ahead[i]] or 0) end
  local wait_s = ahead / capacity + own / service_rate(t, capacity)
  if t.share > 0 then wait_s = math.min(wait_s, own / (t.share * capacity)) end
  return wait_s * 1000
end

-- probability(x, limit): 0 up to half of the limit, 1 from the limit on, with a quadratic rise between. A threshold would reject
-- all requests at one moment and none at the next, in step with the clients' retries.
local function probability(x, limit)
  if limit < 0 then return 0 end
  local over = math.max(0, 2 * x / limit - 1)
  return over >= 1 and 1 or over * over
end

-- set_shed_bounds(t, max_ahead, capacity): at most `max_ahead` requests are ahead of any request of this call. If none of this
-- tier can be shed, sets t.never_sheds; then no request waits longer than t.max_wait_ms.
local function set_shed_bounds(t, max_ahead, capacity)
  t.max_wait_ms = capacity > 0 and max_ahead / service_rate(t, capacity) * 1000 or 0
  t.never_sheds = probability(max_ahead, t.shed_depth) == 0 and probability(t.max_wait_ms, t.shed_wait_ms) == 0
end

-- draw(id): a number from 0 to 1 that depends on the id only, so that a repeated call has the same outcome.
local function draw(id)
  return (tonumber(string.sub(id, -4), 16) or 0) / 65536
end

-- shed(t, id, capacity, longest_ms, own_depth, g) -> 'shed' or 'predicted_wait', and the predicted wait in ms; or nil. A request that need not
-- wait is accepted however little time it has: otherwise one slow run would reject all requests, and no new run would be measured.
local function shed(t, id, capacity, longest_ms, own_depth, g)
  if t.never_sheds and t.max_wait_ms < longest_ms then return end
  local own = own_depth(g)
  local ahead = requests_ahead(t, own)
  local wait_ms = predicted_wait_ms(t, capacity, own)
  local p = math.max(probability(ahead, t.shed_depth), probability(wait_ms, t.shed_wait_ms))
  if p > 0 and p > draw(id) then return 'shed', wait_ms end
  if wait_ms > 0 and wait_ms >= longest_ms then return 'predicted_wait', wait_ms end
end
