-- wake: at most one token waits for the sleeping schedulers; a lost one costs a second, nothing else (needs prelude).
local function wake()
  if call('LLEN', P .. 'wake') == 0 then call('LPUSH', P .. 'wake', 1) end
end

-- wake_at(depth): a token where any dispatcher asked to be woken at this many waiting requests, or none is asleep.
local function wake_at(depth)
  local wishes, asleep = call('HGETALL', P .. 'wake_at'), false
  for i = 1, #wishes, 2 do
    local at, holds = string.match(wishes[i + 1], '^(%d+) (%d+)')
    if tonumber(holds) < now then call('HDEL', P .. 'wake_at', wishes[i])
    else
      asleep = true
      if tonumber(at) > 0 and depth >= tonumber(at) then return wake() end
    end
  end
  if not asleep then wake() end
end
