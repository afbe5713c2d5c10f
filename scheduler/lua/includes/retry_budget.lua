-- retry_budget: how many retries the pool may start now, so that a wave of losses does not double the load (needs prelude).
-- As in Finagle: 20 % of the recently accepted requests, plus ten per second. The balance decays towards FLOOR, ten seconds of
-- ten per second, with the time constant DECAY_US.
local FLOOR = 100

-- decayed(tokens, elapsed_us): the balance after that time; no time has passed if TIME went backwards.
local function decayed(tokens, elapsed_us)
  local DECAY_US = 10000000
  return FLOOR + (tokens - FLOOR) * math.exp(-math.max(0, elapsed_us) / DECAY_US)
end

local function balance()
  local row = call('HMGET', P .. 'retry_budget', 'tokens', 'at')
  local tokens, updated_at = tonumber(row[1]), tonumber(row[2])
  return tokens and updated_at and decayed(tokens, now_us - updated_at) or FLOOR
end

local function set_balance(tokens)
  local KEEP_MS = 60000 -- by then it is FLOOR again, the value of a missing key
  call('HSET', P .. 'retry_budget', 'tokens', string.format('%.6f', tokens), 'at', string.format('%.0f', now_us))
  call('PEXPIRE', P .. 'retry_budget', KEEP_MS)
end

local function deposit(accepted)
  local PER_ACCEPTED = 0.2
  set_balance(balance() + accepted * PER_ACCEPTED)
end

-- withdraw(wanted) -> how many of these retries are granted.
local function withdraw(wanted)
  local tokens = balance()
  local granted = math.min(wanted, math.floor(tokens))
  if granted > 0 then set_balance(tokens - granted) end
  return granted
end
