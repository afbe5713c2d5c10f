-- idempotency: what a client's Idempotency-Key leads to (needs prelude). `idem:<value>` names the request that has it.
local DAY_MS = 86400000
local FINAL = {poison_request = true, invalid_request = true} -- failures that another run would only repeat

-- held(value, fingerprint) -> replayed or in_progress (and which request has the key), or reused; nil where a request may
-- have it: it is new, or the one that had it is forgotten, or failed in a way that says nothing about its input.
local function held(value, fingerprint)
  if value == '' then return nil end
  local row = call('HMGET', P .. 'idem:' .. value, 'id', 'fp')
  if not row[1] then return nil end
  if row[2] ~= fingerprint then return 'reused' end
  local key = P .. 'request:' .. row[1]
  local request = call('HMGET', key, 'state', 'code')
  local runs = request[1] == 'queued' or request[1] == 'processing' or request[1] == 'riding'
  if runs then return 'in_progress', row[1] end
  -- One that was answered past Redis is known to be completed, but its answer is not here.
  local answered = (request[1] == 'completed' or FINAL[request[2]]) and call('HEXISTS', key, 'reply') == 1
  if answered then return 'replayed', row[1] end
end

-- hold(value, fingerprint, id, again): from now on the key is this request's, which is kept as long as the key. One
-- that is told again does not take the key from a request that got it after Redis was lost.
local function hold(value, fingerprint, id, again)
  local key, row = P .. 'idem:' .. value, P .. 'request:' .. id
  call('HSET', row, 'idem', value)
  outlive(row, DAY_MS)
  if again and call('EXISTS', key) == 1 then return end
  call('HSET', key, 'id', id, 'fp', fingerprint)
  call('PEXPIRE', key, DAY_MS)
end
