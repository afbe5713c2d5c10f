-- ending: the one compare-and-set into a terminal state, and what goes out with it (needs prelude and repaying).
-- read(id) gives a row; close(id, row, ...) ends it once; flush() writes an outbox element and one message a gateway.
local STATE, TIER, GATEWAY, CUSTOMER, NONCE, AT, FORMED, TRIES, BATCH, DEADLINE, QUEUE_DEADLINE, PAID = 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12
local NO_BATCH = {id = '', size = 0, worker = ''}
local NO_RUN = {gpu_ms = -1, tokens = 0, bytes = 0, tail = cmsgpack.pack(-1, 0, '', '')}
local ended, letters, mail = {}, {}, {}

local function read(id)
  return redis.call('HMGET', P .. 'request:' .. id, 'state', 'tier', 'gw', 'cust', 'nonce', 'at', 'formed', 'tries', 'batch', 'dl', 'qdl', 'paid')
end

local function open(row)
  return row[STATE] == 'queued' or row[STATE] == 'processing'
end

-- settle(id, state, code, ...): the write of a terminal state, only for a row that is open; more fields may follow.
local function settle(id, state, code, ...)
  local key = P .. 'request:' .. id
  redis.call('HSET', key, 'state', state, 'code', code, 'ended', now, ...)
  redis.call('HDEL', key, 'body')
end

-- leave(id, row): out of the list of its batch, which may be empty then: its owner or the reaper drops it.
local function leave(id, row)
  redis.call('LREM', P .. 'inflight:' .. row[TIER] .. ':' .. row[BATCH], 1, id)
end

-- close(id, row, state, code, batch, run) -> true once, false where the request has ended before or is not known.
-- `run` is {gpu_ms, tokens, bytes, tail}; `tail` holds the last four fields of a reply, packed by the worker.
local function close(id, row, state, code, batch, run)
  if not open(row) then return false end
  local queue_ms = row[FORMED] and row[FORMED] - row[AT] or -1
  local tries = tonumber(row[TRIES] or 0)
  local reply = string.char(0x9e) .. cmsgpack.pack(id, row[CUSTOMER], row[NONCE], state, code, tries, queue_ms,
    batch.id, batch.size, batch.worker) .. run.tail
  settle(id, state, code, 'reply', reply)
  repay(id, row[CUSTOMER], row[PAID], state, code, run.tokens)
  ended[#ended + 1] = {'e', id, state, code, now, now - row[AT], queue_ms, run.gpu_ms, batch.id, batch.size,
    batch.worker, tries, run.tokens, run.bytes}
  local box = mail[row[GATEWAY]] or {}
  mail[row[GATEWAY]], box[#box + 1] = box, reply
  return true
end

local function flush()
  if #ended == 0 then return end
  repay_all()
  redis.call('LPUSH', P .. 'outbox', cmsgpack.pack(ended))
  for _, letter in ipairs(letters) do redis.call('LPUSH', P .. 'outbox', cmsgpack.pack({letter})) end -- they are large
  for gateway, replies in pairs(mail) do redis.call('PUBLISH', P .. 'responses:' .. gateway, array(replies)) end
end
