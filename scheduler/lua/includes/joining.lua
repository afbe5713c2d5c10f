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

-- take(tier, count, visit): visit(id, row) for the oldest `count` that may run; all of them have left the queue.
local function take(tier, count, visit)
  local left, looks = count, count * LOOKS
  while left > 0 and looks > 0 do
    local ids = call('RPOP', P .. 'queue:' .. tier, math.min(looks, left))
    if not ids then return end
    looks = looks - #ids
    for _, id in ipairs(ids) do
      local row = fit(id)
      if row then
        left, latest = left - 1, math.max(latest, row[DEADLINE])
        visit(id, row)
      end
    end
  end
end

-- oldest(picks) -> for each pick the ids that join, oldest first.
local function oldest(picks)
  local chosen = {}
  for i, pick in ipairs(picks) do
    local ids = {}
    take(pick[1], pick[2], function(id) ids[#ids + 1] = id end)
    chosen[i] = ids
  end
  return chosen
end
