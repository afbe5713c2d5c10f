-- retry_budget: how many retries the pool may afford now, so that a wave of losses is not doubled by retries of its
-- own (needs prelude). Finagle's rule: a fifth of what was accepted lately, and ten a second besides.
-- The balance moves towards FLOOR, ten seconds of ten a second, with a time constant of FADES_US: old credit fades.
local PER_ACCEPTED, FLOOR, FADES_US, KEEP_MS = 0.2, 100, 10000000, 60000

-- faded(tokens, elapsed_us): the balance after that time; none has passed where TIME went backwards.
local function faded(tokens, elapsed_us)
  return FLOOR + (tokens - FLOOR) * math.exp(-math.max(0, elapsed_us) / FADES_US)
end

local function balance()
  local row = call('HMGET', P .. 'retry_budget', 'tokens', 'at')
  local tokens, at = tonumber(row[1]), tonumber(row[2])
  return tokens and at and faded(tokens, now_us - at) or FLOOR
end

local function set_balance(tokens)
  call('HSET', P .. 'retry_budget', 'tokens', string.format('%.6f', tokens), 'at', string.format('%.0f', now_us))
  call('PEXPIRE', P .. 'retry_budget', KEEP_MS) -- by then it is FLOOR again, which is what a missing one counts
end

local function deposit(accepted)
  set_balance(balance() + accepted * PER_ACCEPTED)
end

-- withdraw(wanted) -> how many of these retries are granted.
local function withdraw(wanted)
  local tokens = balance()
  local granted = math.min(wanted, math.floor(tokens))
  if granted > 0 then set_balance(tokens - granted) end
  return granted
end
