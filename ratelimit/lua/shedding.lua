-- shedding: who is turned away before the queue, lowest tier first, and not all at once (needs prelude).
-- `depth` is what waits in each tier; `t` is a tier's limits.
local depth = {}

-- no_scheduler_passes(pass_ms): whether requests wait because no scheduler forms batches, not because the GPUs are busy. What
-- waits then says nothing about capacity, so no tier is shed by depth; the predicted wait and the largest depth still hold.
-- Bounded: a scheduler or a gateway in its place is back within GAP_MS, or the depth counts again.
local MISSED, GAP_MS = 2.5, 2000
local function no_scheduler_passes(pass_ms)
  local passed = tonumber(redis.pcall('GET', P .. 'reaped_at'))
  local late_ms = passed and now - passed - MISSED * pass_ms or 0
  return late_ms > 0 and late_ms < GAP_MS
end

-- served_before(t) -> requests that are served before the next one of this tier, at the latest: all that wait in it and
-- above it, or, as its share of the capacity is guaranteed, those of its own at the pace of that share.
local function served_before(t)
  local ahead = 0
  for i = 1, #t.ahead do ahead = ahead + (depth[t.ahead[i]] or 0) end
  return t.share > 0 and math.min(ahead, depth[t.name] / t.share) or ahead
end

-- pace(t, capacity) -> requests/s of this tier that are served while it has a queue: what the others ask for is not its own.
local function pace(t, capacity)
  return math.max(math.min(t.rate, capacity), t.share * capacity, 0.001)
end

-- predicted_ms(t, capacity) -> how long the next one of this tier waits: for what is queued above it, and for its own queue
-- at its pace; at most for its own at the pace of its guaranteed share. 0 where the capacity is not known.
local function predicted_ms(t, capacity)
  if capacity <= 0 then return 0 end
  local own, ahead = depth[t.name], 0
  for i = 1, #t.ahead do ahead = ahead + (depth[t.ahead[i]] or 0) end
  local wait_s = (ahead - own) / capacity + own / pace(t, capacity)
  if t.share > 0 then wait_s = math.min(wait_s, own / (t.share * capacity)) end
  return wait_s * 1000
end

-- probability(x, limit): 0 up to half of the limit, 1 from the limit on, rising from nothing in between. A cliff would
-- turn away everybody in one moment and nobody in the next, in step with the clients' retries.
local function probability(x, limit)
  if limit < 0 then return 0 end
  local over = math.max(0, 2 * x / limit - 1)
  return over >= 1 and 1 or over * over
end

-- foresee(t, most, capacity): whether nobody of this tier can be shed in this call, since at most so many will be ahead of
-- anybody: t.calm, and then nobody waits longer than t.longest_ms.
local function foresee(t, most, capacity)
  t.longest_ms = capacity > 0 and most / pace(t, capacity) * 1000 or 0
  t.calm = probability(most, t.shed_depth) == 0 and probability(t.longest_ms, t.shed_wait_ms) == 0
end

-- draw(id): a number from 0 to 1 that is the request's own, so that the call that is repeated says the same.
local function draw(id)
  return (tonumber(string.sub(id, -4), 16) or 0) / 65536
end

-- shed(t, id, capacity, longest_ms) -> 'shed' or 'predicted_wait' with the predicted wait in ms, or nil. Who need not wait
-- is let in however little time there is: else a run that was measured slow once would keep everybody out, unmeasured.
local function shed(t, id, capacity, longest_ms)
  if t.calm and t.longest_ms < longest_ms then return end
  local ahead = served_before(t)
  local wait_ms = predicted_ms(t, capacity)
  local p = math.max(probability(ahead, t.shed_depth), probability(wait_ms, t.shed_wait_ms))
  if p > 0 and p > draw(id) then return 'shed', wait_ms end
  if wait_ms > 0 and wait_ms >= longest_ms then return 'predicted_wait', wait_ms end
end
