-- batch_selection: which requests leave their tier queues for a batch (needs row, finalize, owners, fair_order, and the
-- argument gone_ms).
local formed_at, dropped = string.format('%d', now), 0
local latest_deadline = now -- of the requests that were taken
local NO_IDS, seen = {}, {}

-- end_code(row) -> the error code with which a queued request ends now, or nil if it may run.
local function end_code(row)
  if now >= row[DEADLINE] then return 'deadline_exceeded' end
  if now >= row[QUEUE_DEADLINE] then return 'queue_timeout' end
  if abandoned(row, gone_ms) then return 'gateway_lost' end
end

-- read_runnable(id) -> its row if it may run. Others end here; a request that has ended before is skipped.
local function read_runnable(id)
  local row, is_damaged = peek_row(id)
  if is_damaged then
    quarantine(id, row)
    dropped = dropped + 1
    return nil
  end
  if row[STATE] ~= 'queued' then return nil end
  if now < row[DEADLINE] and now < row[QUEUE_DEADLINE] and now - row[AT] < gone_ms then return row end -- as for end_code
  local code = end_code(row)
  if not code then return row end
  if finalize(id, row, 'failed', code, NO_BATCH, NO_RUN) then dropped = dropped + 1 end
end

-- take(tier, count, visit): pops the oldest `count` requests that may run, and calls visit(id, row) for each. One for which
-- `visit` returns false is not counted.
local function take(tier, count, visit)
  apart.used = apart.used and not apart.allowed -- a batch without a runnable request takes others
  local READS_PER_PLACE = 4 -- limits the work that dead entries in a queue can cause
  local left, reads_left, is_queue_empty = apart.used and 0 or count, count * READS_PER_PLACE, false
  while left > 0 and reads_left > 0 do
    local wanted = math.min(reads_left, left)
    local ids = not is_queue_empty and call('RPOP', P .. 'queue:' .. tier, wanted) or NO_IDS
    is_queue_empty = #ids < wanted
    if #ids == 0 and backlogs.waiting[tier] > 0 and (apart.allowed or not apart.used) then ids = next_ids(tier, wanted) end
    if #ids == 0 then return end
    reads_left = reads_left - #ids
    for _, id in ipairs(ids) do
      local row = not seen[id] and read_runnable(id) -- a repaired queue may have an id twice
      seen[id] = true
      if not row then credit(tier, id) end
      if row and visit(id, row) ~= false then
        apart.allowed = false
        left, latest_deadline = left - 1, math.max(latest_deadline, row[DEADLINE])
      end
    end
  end
end

-- another_worker_idle(): whether a worker is still idle after one has claimed the batch that is formed now.
local function another_worker_idle()
  return call('ZCARD', P .. 'leases') + 1 < tonumber(call('GET', P .. 'healthy_gpu_count') or 0)
end

-- select_oldest(picks, may_separate) -> for each pick the ids that join, oldest first. A large body delays all members of its batch
-- at every step. So large requests of a lower tier stay at the head of their queue, for the next batch, while another worker is idle. If
-- none is idle, they join, because separate batches would use more worker time.
local function select_oldest(picks, may_separate)
  local selected, separate_large = {}, nil
  for i, pick in ipairs(picks) do
    local ids, large = {}, {}
    take(pick[1], pick[2], function(id, row)
      if separate_large and account_of(row).large then
        large[#large + 1] = id
        return false
      end
      ids[#ids + 1] = id
    end)
    for j = #large, 1, -1 do call('RPUSH', P .. 'queue:' .. pick[1], large[j]) end
    if separate_large == nil and #ids > 0 and i < #picks then separate_large = may_separate and another_worker_idle() end
    selected[i] = ids
  end
  return selected
end

-- Selection by length within a token limit: a batch costs its size times its longest member, because shorter ones are padded.

-- pop_candidates(picks) -> {{id, tier (index of the pick), n, tokens, age_ms}...}; all have left their queues.
local function pop_candidates(picks)
  local CANDIDATES_PER_PLACE = 2 -- the oldest; the work does not grow with the queue
  local BYTES_PER_TOKEN, candidates = 4, {}
  for i, pick in ipairs(picks) do
    take(pick[1], pick[2] * CANDIDATES_PER_PLACE, function(id, row)
      local bytes = call('HSTRLEN', P .. 'request:' .. id, 'body')
      candidates[#candidates + 1] = {id = id, tier = i, n = #candidates, tokens = math.ceil(bytes / BYTES_PER_TOKEN),
        age_ms = now - row[AT]}
    end)
  end
  return candidates
end

-- rank(candidates, aged_ms): sorts by priority. The first is the reference: the request that has waited longest, if at least
-- `aged_ms`, else the oldest of the first tier. Then strictly by tier; within a tier, first those that have waited for
-- `aged_ms`, then those closest in length to the reference.
local function rank(candidates, aged_ms)
  local reference = candidates[1]
  for _, c in ipairs(candidates) do
    if c.age_ms >= aged_ms and c.age_ms > reference.age_ms then reference = c end
  end
  for _, c in ipairs(candidates) do -- lengths within a factor of 1.4 count as equal
    c.distance = c.age_ms >= aged_ms and -1 or math.floor(2.9 * math.abs(math.log((c.tokens + 8) / (reference.tokens + 8))))
    if c == reference then c.tier_rank = 0 else c.tier_rank = c.tier end
  end
  table.sort(candidates, function(a, b)
    if a.tier_rank ~= b.tier_rank then return a.tier_rank < b.tier_rank end
    if a.distance ~= b.distance then return a.distance < b.distance end
    return a.n < b.n
  end)
end

-- select_by_length(picks, max_tokens, aged_ms) -> for each pick the ids that join, oldest first; the others keep their places.
local function select_by_length(picks, max_tokens, aged_ms)
  local candidates, taken, longest, count, selected = pop_candidates(picks), {}, 0, 0, {}
  if #candidates > 0 then rank(candidates, aged_ms) end
  for i in ipairs(picks) do taken[i], selected[i] = 0, {} end
  for _, c in ipairs(candidates) do -- a request over the limit runs alone
    local new_longest = math.max(longest, c.tokens)
    if taken[c.tier] < picks[c.tier][2] and (count == 0 or (count + 1) * new_longest <= max_tokens) then
      c.joins, longest, count, taken[c.tier] = true, new_longest, count + 1, taken[c.tier] + 1
    end
  end
  table.sort(candidates, function(a, b) return a.n > b.n end)
  for _, c in ipairs(candidates) do -- newest first, so that the oldest is at the head again
    if c.joins then table.insert(selected[c.tier], 1, c.id) else call('RPUSH', P .. 'queue:' .. picks[c.tier][1], c.id) end
  end
  return selected
end
