-- wake: wakes sleeping dispatchers (needs prelude). At most one token is in the list; a lost token costs a second.
local function wake()
  if call('LLEN', P .. 'wake') == 0 then call('LPUSH', P .. 'wake', 1) end
end

-- wake_if(is_met): pushes a token if is_met(depth, ready, event) for the condition of any sleeping dispatcher, or if none sleeps.
-- `event`: 'idle' if only the first idle worker wakes it, 'slot' if only a free slot does, else ''. Older processes do not read it,
-- and `ready` is 0 for them.
local function wake_if(is_met)
  local conditions, asleep = call('HGETALL', P .. 'wake_at'), false
  for i = 1, #conditions, 2 do
    local depth, valid_until, ready, event = string.match(conditions[i + 1], '^(%d+) (%d+) ?(%-?%d*) ?(%a*)')
    if tonumber(valid_until) < now then call('HDEL', P .. 'wake_at', conditions[i])
    else
      asleep = true
      if is_met(tonumber(depth), tonumber(ready) or 0, event) then return wake() end
    end
  end
  if not asleep then wake() end
end

-- wake_for_depth(waiting): that many requests are queued now.
local function wake_for_depth(waiting)
  wake_if(function(depth) return depth > 0 and waiting >= depth end)
end

-- wake_for_worker(is_idle): a worker claimed a batch, or has none any more (`is_idle`).
local function wake_for_worker(is_idle)
  local level, is_first = call('LLEN', P .. 'batch_queue'), false
  if is_idle then
    local leased, healthy = call('ZCARD', P .. 'leases'), tonumber(call('GET', P .. 'healthy_gpu_count') or '') or -1
    is_first = healthy - leased == 1 or level == 0 and (leased == 0 or healthy < 0)
    if level > 0 and not is_first then return end -- this worker claims the next batch, and the claim wakes
    if level == 0 and leased == 0 then level = -1 end
  end
  wake_if(function(_, ready, event)
    if event == 'slot' then return false end
    if event == 'idle' then return is_first end
    return ready >= level and (level <= 0 or not is_idle)
  end)
end

-- wake_for_slot(): a worker has more free slots.
local function wake_for_slot()
  wake_if(function(_, _, event) return event == 'slot' end)
end
