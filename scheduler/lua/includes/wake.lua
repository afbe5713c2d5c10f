-- wake(): at most one token waits for the sleeping schedulers; a lost one costs a reaper pass, nothing else.
local function wake()
  if redis.call('LLEN', P .. 'wake') == 0 then redis.call('LPUSH', P .. 'wake', 1) end
end
