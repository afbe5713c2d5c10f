-- grouping: which requests leave their tier queues for a batch (needs ending, owners and row; ARGV as form_batch has them).
-- joining: who leaves its tier queue for a batch (needs prelude, row, ending and owners; ARGV as form_batch has them).
local formed_at, gone_ms, dropped = string.format('%d', now), tonumber(ARGV[8]), 0
local latest = now -- the latest deadline of those that were taken
local LOOKS = 4 -- a place: a heap of dead ids must not hold the server

-- unfit(row) -> the error code that ends a queued request now, or nil where it may run.
local function unfit(row)
  if now >= row[DEADLINE] then return 'deadline_exceeded' end
  if now >= row[QUEUE_DEADLINE] then return 'queue_timeout' end
  if abandoned(row, gone_ms) then return 'gateway_lost' end
end

-- fit(id) -> its row, where it may run; what must not run ends here, and what has ended before is passed over.
local function fit(id)
  local before, row = #damaged, read(id)
  dropped = dropped + #damaged - before
  if row[STATE] ~= 'queued' then return nil end
  local code = unfit(row)
  if not code then return row end
  if close(id, row, 'failed', code, NO_BATCH, NO_RUN) then dropped = dropped + 1 end
end

-- take(tier, count, visit): visit(id, row) for the oldest `count` that may run; all of them have left the queue. A request for
-- which `visit` returns false does not count.
local function take(tier, count, visit)
  local left, looks = count, count * LOOKS
  while left > 0 and looks > 0 do
    local ids = call('RPOP', P .. 'queue:' .. tier, math.min(looks, left))
    if not ids then return end
    looks = looks - #ids
    for _, id in ipairs(ids) do
      local row = fit(id)
      if row and visit(id, row) ~= false then
        left, latest = left - 1, math.max(latest, row[DEADLINE])
      end
    end
  end
end

-- another_idle(): whether a worker stays idle when one has taken the batch that is formed now.
local function another_idle()
  return call('ZCARD', P .. 'leases') + 1 < tonumber(call('GET', P .. 'healthy_gpu_count') or 0)
end

-- oldest(picks) -> for each pick the ids that join, oldest first. A large body delays all members of its batch, at every step.
-- So large requests of a lower tier stay at the head of their queue, for the next batch, while another worker is idle. While
-- none is, they join: separate batches would use more of the workers' time.
local function oldest(picks)
  local chosen, apart = {}, nil
  for i, pick in ipairs(picks) do
    local ids, large = {}, {}
    take(pick[1], pick[2], function(id, row)
      if apart and party(row).large then
        large[#large + 1] = id
        return false
      end
      ids[#ids + 1] = id
    end)
    for j = #large, 1, -1 do call('RPUSH', P .. 'queue:' .. pick[1], large[j]) end
    if apart == nil and #ids > 0 and i < #picks then apart = another_idle() end
    chosen[i] = ids
  end
  return chosen
end

-- grouping: batches of similar length within a budget of tokens (needs prelude and joining).
-- A batch costs its members times the longest of them, since the shorter ones are padded, or wait, until it is done.
local WINDOW = 2 -- candidates a place, from the oldest on: what is looked at does not grow with the queue
local BYTES_PER_TOKEN = 4

-- candidates(picks) -> {{id, tier (its place among the picks), n, tokens, age_ms}...}; all have left their queues.
local function candidates(picks)
  local found = {}
  for i, pick in ipairs(picks) do
    take(pick[1], pick[2] * WINDOW, function(id, row)
      local bytes = call('HSTRLEN', P .. 'request:' .. id, 'body')
      found[#found + 1] = {id = id, tier = i, n = #found, tokens = math.ceil(bytes / BYTES_PER_TOKEN), age_ms = now - row[AT]}
    end)
  end
  return found
end

-- rank(found, aged_ms): who is seated before whom. First the leader: whoever has waited longest, if for `aged_ms`, else
-- the oldest of the first tier. Then strictly by tier; in each, who has waited for so long, then who is like the leader.
local function rank(found, aged_ms)
  local leader = found[1]
  for _, c in ipairs(found) do
    if c.age_ms >= aged_ms and c.age_ms > leader.age_ms then leader = c end
  end
  for _, c in ipairs(found) do -- lengths within a factor of 1.4 are alike
    c.unlike = c.age_ms >= aged_ms and -1 or math.floor(2.9 * math.abs(math.log((c.tokens + 8) / (leader.tokens + 8))))
    if c == leader then c.tier_rank = 0 else c.tier_rank = c.tier end
  end
  table.sort(found, function(a, b)
    if a.tier_rank ~= b.tier_rank then return a.tier_rank < b.tier_rank end
    if a.unlike ~= b.unlike then return a.unlike < b.unlike end
    return a.n < b.n
  end)
end

-- grouped(picks, budget, aged_ms) -> for each pick the ids that join, oldest first; the others stand where they stood.
local function grouped(picks, budget, aged_ms)
  local found, seated, longest, count, chosen = candidates(picks), {}, 0, 0, {}
  if #found > 0 then rank(found, aged_ms) end
  for i in ipairs(picks) do seated[i], chosen[i] = 0, {} end
  for _, c in ipairs(found) do -- one that is over the budget by itself goes alone
    local most = math.max(longest, c.tokens)
    if seated[c.tier] < picks[c.tier][2] and (count == 0 or (count + 1) * most <= budget) then
      c.joins, longest, count, seated[c.tier] = true, most, count + 1, seated[c.tier] + 1
    end
  end
  table.sort(found, function(a, b) return a.n > b.n end)
  for _, c in ipairs(found) do -- youngest first, so that the oldest is at the head again
    if c.joins then table.insert(chosen[c.tier], 1, c.id) else call('RPUSH', P .. 'queue:' .. picks[c.tier][1], c.id) end
  end
  return chosen
end
