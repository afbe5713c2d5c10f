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
