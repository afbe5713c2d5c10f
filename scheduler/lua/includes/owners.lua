-- owners: whether anybody still waits for a request (needs prelude and row).
-- Jobs have no gateway that waits for them, and are wanted whoever is gone.
local alive = {jobs = true}

-- spared(): Redis or the schedulers stood still a moment ago, and no gateway had the time to beat since. The reaper, which
-- passes every 100 ms, notes it; before it does, its last pass is long ago.
local SILENCE_MS, grace = 500, nil
local function spared()
  if grace == nil then
    local last = tonumber(call('GET', P .. 'reaped_at') or now)
    grace = now - last > SILENCE_MS or call('EXISTS', P .. 'resumed_at') == 1
  end
  return grace
end

-- abandoned(row, gone_ms): nobody waits for it any more. A request younger than that shows itself that its gateway
-- lived, whatever Redis has forgotten meanwhile.
local function abandoned(row, gone_ms)
  if now - row[AT] < gone_ms or spared() then return false end
  local gateway = party(row).gateway
  if alive[gateway] == nil then alive[gateway] = call('EXISTS', P .. 'gateway:' .. gateway) == 1 end
  return not alive[gateway]
end
