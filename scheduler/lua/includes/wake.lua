-- wake: at most one token waits for the sleeping schedulers; a lost one costs a second, nothing else (needs prelude).
local function wake()
  if redis.call('LLEN', P .. 'wake') == 0 then redis.call('LPUSH', P .. 'wake', 1) end
end

-- wake_at(depth): a token only where a scheduler asked to be woken at this many waiting requests, or never asked.
local function wake_at(depth)
  local at = tonumber(redis.call('GET', P .. 'wake_at') or 1)
  if at > 0 and depth >= at then wake() end
end
