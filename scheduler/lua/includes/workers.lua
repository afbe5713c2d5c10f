-- workers: who beats, and who counts as healthy (needs prelude).
-- workers(gone_ms) -> {{id, age_ms, healthy, beat}...}; `beat` is the packed heartbeat, as the worker sent it.
-- A worker silent for REMEMBER_MS is forgotten; until then health shows it as lost.
local REMEMBER_MS = 300000

local function workers(gone_ms)
  redis.call('ZREMRANGEBYSCORE', P .. 'gpus', '-inf', now - REMEMBER_MS)
  local rows, healthy = {}, 0
  local seen = redis.call('ZRANGE', P .. 'gpus', 0, -1, 'WITHSCORES')
  for i = 1, #seen, 2 do
    local row = redis.call('HMGET', P .. 'gpu:' .. seen[i], 'status', 'beat')
    local age = math.max(0, now - seen[i + 1])
    local well = age <= gone_ms and (row[1] == 'ready' or row[1] == 'busy')
    if well then healthy = healthy + 1 end
    rows[#rows + 1] = {seen[i], age, well, row[2] or ''}
  end
  return rows, healthy
end
