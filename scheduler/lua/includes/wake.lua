-- wake: at most one token waits for the sleeping schedulers; a lost one costs a second, nothing else (needs prelude).
local function wake()
  if call('LLEN', P .. 'wake') == 0 then call('LPUSH', P .. 'wake', 1) end
end

-- wake_for(wanted): a token where any dispatcher asleep has a wish (depth, ready) that is met, or where none is asleep.
local function wake_for(met)
  local wishes, asleep = call('HGETALL', P .. 'wake_at'), false
  for i = 1, #wishes, 2 do
    local depth, holds, ready = string.match(wishes[i + 1], '^(%d+) (%d+) ?(%-?%d*)')
    if tonumber(holds) < now then call('HDEL', P .. 'wake_at', wishes[i])
    else
      asleep = true
      if met(tonumber(depth), tonumber(ready) or 0) then return wake() end
    end
  end
  if not asleep then wake() end
end

-- wake_at(waiting): so many requests wait now.
local function wake_at(waiting)
  wake_for(function(depth) return depth > 0 and waiting >= depth end)
end

-- wake_free(): a worker took a batch or ended one.
local function wake_free()
  local level = call('LLEN', P .. 'batch_queue')
  if level == 0 and call('ZCARD', P .. 'leases') == 0 then level = -1 end
  wake_for(function(_, ready) return ready >= level end)
end
