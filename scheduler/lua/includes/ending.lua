-- ending: the one compare-and-set into a terminal state, and what goes out with it (needs prelude).
-- read(id) gives a row; close(id, row, ...) ends it once; flush() writes one outbox element and one message a gateway.
local STATE, TIER, GATEWAY, CUSTOMER, NONCE, AT, FORMED, TRIES, BATCH, DEADLINE, QUEUE_DEADLINE = 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11
local NO_BATCH = {id = '', size = 0, worker = ''}
local NO_RUN = {gpu_ms = -1, tokens = 0, bytes = 0, tail = cmsgpack.pack(-1, 0, '', '')}
local ended, mail, alive = {}, {}, {}

local function read(id)
  return redis.call('HMGET', P .. 'request:' .. id, 'state', 'tier', 'gw', 'cust', 'nonce', 'at', 'formed', 'tries', 'batch', 'dl', 'qdl')
end

-- close(id, row, state, code, batch, run) -> true once, false where the request has ended before or is not known.
-- `run` is {gpu_ms, tokens, bytes, tail}; `tail` holds the last four fields of a reply, packed by the worker.
local function close(id, row, state, code, batch, run)
  if row[STATE] ~= 'queued' and row[STATE] ~= 'processing' then return false end
  local queue_ms = row[FORMED] and row[FORMED] - row[AT] or -1
  local tries = tonumber(row[TRIES] or 0)
  local reply = string.char(0x9e) .. cmsgpack.pack(id, row[CUSTOMER], row[NONCE], state, code, tries, queue_ms,
    batch.id, batch.size, batch.worker) .. run.tail
  local key = P .. 'request:' .. id
  redis.call('HSET', key, 'state', state, 'code', code, 'ended', now, 'reply', reply)
  redis.call('HDEL', key, 'body')
  ended[#ended + 1] = {'e', id, state, code, now, now - row[AT], queue_ms, run.gpu_ms, batch.id, batch.size,
    batch.worker, tries, run.tokens, run.bytes}
  local box = mail[row[GATEWAY]] or {}
  mail[row[GATEWAY]], box[#box + 1] = box, reply
  return true
end

-- abandoned(row, gone_ms): nobody waits for it any more. A request younger than that shows itself that its gateway
-- lived, whatever Redis has forgotten meanwhile.
local function abandoned(row, gone_ms)
  if now - row[AT] < gone_ms then return false end
  local gateway = row[GATEWAY]
  if alive[gateway] == nil then alive[gateway] = redis.call('EXISTS', P .. 'gateway:' .. gateway) == 1 end
  return not alive[gateway]
end

local function flush()
  if #ended == 0 then return end
  redis.call('LPUSH', P .. 'outbox', cmsgpack.pack(ended))
  for gateway, replies in pairs(mail) do redis.call('PUBLISH', P .. 'responses:' .. gateway, array(replies)) end
end
