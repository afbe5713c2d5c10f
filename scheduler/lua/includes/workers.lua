-- workers: which workers send heartbeats, and which are healthy (needs prelude and worker_status).
-- A worker without heartbeats for FORGET_MS is removed; until then health reports it as lost.
local FORGET_MS = 300000

local function remove_stale()
  call('ZREMRANGEBYSCORE', P .. 'gpus', '-inf', now - FORGET_MS)
end

-- workers(gone_ms) -> {{id, age_ms, healthy, paused, beat}...}; `beat` is the packed heartbeat, as the worker sent it.
local function workers(gone_ms)
  remove_stale()
  local rows = {}
  local heartbeats = call('ZRANGE', P .. 'gpus', 0, -1, 'WITHSCORES')
  for i = 1, #heartbeats, 2 do
    local row = call('HMGET', P .. 'gpu:' .. heartbeats[i], 'status', 'beat')
    local age = math.max(0, now - heartbeats[i + 1])
    local is_alive = age <= gone_ms
    rows[#rows + 1] = {heartbeats[i], age, is_alive and is_healthy(row[1]), is_alive and row[1] == 'paused', row[2] or ''}
  end
  return rows
end

-- count_workers(gone_ms) -> healthy, known: the numbers only, at half the cost.
local function count_workers(gone_ms)
  remove_stale()
  local healthy, prefix = 0, P .. 'gpu:'
  for _, id in ipairs(call('ZRANGEBYSCORE', P .. 'gpus', now - gone_ms, '+inf')) do
    if is_healthy(call('HGET', prefix .. id, 'status')) then healthy = healthy + 1 end
  end
  return healthy, call('ZCARD', P .. 'gpus')
end

-- is_usable(gone_ms) -> a function that returns whether a worker is healthy.
local function is_usable(gone_ms)
  return function(id)
    local beat_at = tonumber(call('ZSCORE', P .. 'gpus', id))
    return beat_at and now - beat_at <= gone_ms and is_healthy(call('HGET', P .. 'gpu:' .. id, 'status'))
  end
end
