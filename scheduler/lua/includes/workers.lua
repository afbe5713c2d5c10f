-- workers: who beats, and who counts as healthy (needs prelude).
-- workers(gone_ms) -> {{id, age_ms, healthy, pausing, beat}...}; `beat` is the packed heartbeat, as the worker sent it.
-- count_workers(gone_ms) -> healthy, known: the same counted, at half the price.
-- A worker silent for REMEMBER_MS is forgotten; until then health shows it as lost.
local REMEMBER_MS = 300000

local function forget_silent()
  call('ZREMRANGEBYSCORE', P .. 'gpus', '-inf', now - REMEMBER_MS)
end

local function well(status)
  return status == 'ready' or status == 'busy'
end

local function workers(gone_ms)
  forget_silent()
  local rows = {}
  local seen = call('ZRANGE', P .. 'gpus', 0, -1, 'WITHSCORES')
  for i = 1, #seen, 2 do
    local row = call('HMGET', P .. 'gpu:' .. seen[i], 'status', 'beat')
    local age = math.max(0, now - seen[i + 1])
    local beats = age <= gone_ms
    rows[#rows + 1] = {seen[i], age, beats and well(row[1]), beats and row[1] == 'paused', row[2] or ''}
  end
  return rows
end

local function count_workers(gone_ms)
  forget_silent()
  local healthy, head = 0, P .. 'gpu:'
  for _, id in ipairs(call('ZRANGEBYSCORE', P .. 'gpus', now - gone_ms, '+inf')) do
    if well(call('HGET', head .. id, 'status')) then healthy = healthy + 1 end
  end
  return healthy, call('ZCARD', P .. 'gpus')
end
