-- wake: wakes sleeping dispatchers (needs prelude). At most one token is in the list; a lost token costs a second.
local function wake()
  if call('LLEN', P .. 'wake') == 0 then call('LPUSH', P .. 'wake', 1) end
end

-- wake_if(is_met): pushes a token if is_met(depth, ready) for the condition of any sleeping dispatcher, or if none sleeps.
local function wake_if(is_met)
  local conditions, asleep = call('HGETALL', P .. 'wake_at'), false
  for i = 1, #conditions, 2 do
    local depth, valid_until, ready = string.match(conditions[i + 1], '^(%d+) (%d+) ?(%-?%d*)')
    if tonumber(valid_until) < now then call('HDEL', P .. 'wake_at', conditions[i])
    else
      asleep = true
      if is_met(tonumber(depth), tonumber(ready) or 0) then return wake() end
    end
  end
  if not asleep then wake() end
end

-- wake_for_depth(waiting): that many requests are queued now.
local function wake_for_depth(waiting)
  wake_if(function(depth) return depth > 0 and waiting >= depth end)
end

-- wake_for_worker(): a worker claimed a batch or finished one.
local function wake_for_worker()
  local level = call('LLEN', P .. 'batch_queue')
  if level == 0 and call('ZCARD', P .. 'leases') == 0 then level = -1 end
  wake_if(function(_, ready) return ready >= level end)
end
