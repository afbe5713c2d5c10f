-- owners: whether the gateway of a request still runs (needs prelude and row).
-- Jobs have no gateway that waits for them, and are never abandoned.
local is_alive = {jobs = true}

-- in_grace_period(): Redis or the schedulers were suspended a moment ago, and gateways may not have sent heartbeats since. The
-- reaper, which runs every 100 ms, records it; until then its last pass is old.
local SILENCE_MS = 500
local grace = nil
local function in_grace_period()
  if grace == nil then
    local last_pass = tonumber(call('GET', P .. 'reaped_at') or now)
    grace = now - last_pass > SILENCE_MS or call('EXISTS', P .. 'resumed_at') == 1
  end
  return grace
end

-- abandoned(row, gone_ms): whether the gateway of a request is lost. A request younger than `gone_ms` proves that its gateway
-- was alive, even if Redis has lost the heartbeat.
local function abandoned(row, gone_ms)
  if now - row[AT] < gone_ms or in_grace_period() then return false end
  local gateway = account_of(row).gateway
  if is_alive[gateway] == nil then is_alive[gateway] = call('EXISTS', P .. 'gateway:' .. gateway) == 1 end
  return not is_alive[gateway]
end
