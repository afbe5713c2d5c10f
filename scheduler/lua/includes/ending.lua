-- ending: the one compare-and-set into a terminal state, and what goes out with it (needs prelude, row, replays and repaying).
-- close(id, row, ...) ends a row that was read, once; flush() writes an outbox element and one message a gateway.
local NO_BATCH = {id = '', size = 0, worker = '', losses = 0}
local NO_RUN = {-1, 0, 0, cmsgpack.pack(-1, 0, '', '', 0, 'stop')}
local GPU_MS, USED, BYTES, TAIL = 1, 2, 3, 4 -- of a run; its tail is the last six fields of a reply, packed by the worker
local ended, letters, mail, ridden, now_text = {}, {}, {}, {}, string.format('%.0f', now)

-- attempts(batch): how often its members ran, this run included. They were lost together each time before.
local function attempts(batch)
  return batch.losses + (batch.state == 'running' and 1 or 0)
end

-- settle(id, state, code, ...): writes a terminal state, only for an open row, and more fields. The body goes: it has run.
local function settle(id, state, code, ...)
  local key = P .. 'request:' .. id
  if code == '' then call('HSET', key, 'state', state, 'ended', now_text, 'body', '', ...)
  else call('HSET', key, 'state', state, 'ended', now_text, 'body', '', 'code', code, ...) end
end

-- leave(id, row): out of the list of its batch, which may be empty then: its owner or the reaper drops it.
local function leave(id, row) call('LREM', P .. 'inflight:' .. party(row).tier .. ':' .. row[BATCH], 1, id) end

-- alike(batch, state, code): what the ends of one batch have in common, around what is each one's own: in a reply, and in
-- the audit's record of all of them, which ends with a flat list.
local function alike(batch, state, code)
  local all = batch.ends or {}
  local tries, a = attempts(batch), all[code]
  if a and a.tries == tries then return a end
  local from = batch.served_from and packed[batch.served_from] or '' -- one field more, in a reply and in the record
  a = {tries = tries, before = cmsgpack.pack(state, code, tries), after = cmsgpack.pack(batch.id, batch.size, batch.worker), each = {},
    from = from, head = from == '' and '\220\0\16' or '\220\0\17', record = (from == '' and '\153' or '\154') .. '\161f' ..
      cmsgpack.pack(state, code, now, batch.id, batch.size, batch.worker, tries)}
  batch.ends, all[code], ended[#ended + 1] = all, a, a
  return a
end

-- close(...) -> true once, false where the request has ended before or is not known.
local function close(id, row, state, code, batch, run)
  if not open(row) then return false end
  local p, a, nonce, at = party(row), alike(batch, state, code), sub(row[ENV], 54), row[AT]
  local queue_ms, each, box, n = batch.formed and batch.formed - at or -1, a.each, mail[p.gateway], #a.each
  local reply = a.head .. text_head[#id] .. id .. packed[p.customer] .. text_head[#nonce] .. nonce .. a.before ..
    packed[queue_ms] .. a.after .. run[TAIL] .. a.from
  settle(id, state, code, 'reply', reply)
  if p.keep_ms then pcall(keep_replay, id, p.customer, p.keep_ms, row[DEADLINE], replayable(state, code) and #reply) end
  repay(id, row, p, state, code, run[USED])
  each[n + 1], each[n + 2], each[n + 3], each[n + 4], each[n + 5], each[n + 6] = id, now - at, queue_ms, run[GPU_MS], run[USED], run[BYTES]
  if box then box[#box + 1] = reply else mail[p.gateway] = {reply} end
  if p.shared and row[STATE] ~= 'riding' then ridden[#ridden + 1] = {id, row, state, code, batch, run} end
  return true
end

-- end_damaged(): what `read` set aside has failed: its lease and what it paid come back, and its gateway and the audit are told,
-- where the row says whose it is.
local function end_damaged()
  for i, found in ipairs(damaged) do
    local row = {false, false, found.env, found.who}
    local id, p, each = found.id, party(row), alike(NO_BATCH, 'failed', 'internal_error').each
    local at, nonce = number[sub(found.env or '', 1, 13)] or now, sub(found.env or '', 54)
    local n = #each
    each[n + 1], each[n + 2], each[n + 3], each[n + 4], each[n + 5], each[n + 6] = id, now - at, -1, -1, 0, 0
    if p then
      row[ENV] = found.env or ''
      repay(id, row, p, 'failed', 'internal_error', -1)
      local box = mail[p.gateway] or {}
      box[#box + 1] = '\220\0\16' .. cmsgpack.pack(id, p.customer, nonce, 'failed', 'internal_error', 0, -1, '', 0, '') .. NO_RUN[TAIL]
      mail[p.gateway] = box
    end
    ridden[#ridden + 1] = {id, row, 'failed', 'internal_error', NO_BATCH, false}
    damaged[i] = nil
  end
end

local function flush()
  end_damaged()
  if #ended == 0 then return end
  repay_all()
  for i, a in ipairs(ended) do ended[i] = a.record .. cmsgpack.pack(a.each) .. a.from end
  call('LPUSH', P .. 'outbox', array(ended))
  for _, letter in ipairs(letters) do call('LPUSH', P .. 'outbox', cmsgpack.pack({letter})) end -- they are large
  for gateway, replies in pairs(mail) do call('PUBLISH', P .. 'responses:' .. gateway, array(replies)) end
end

-- dead_letters: requests given up for good, kept for people to look at or to send again (needs prelude, row and ending).
local DLQ_CAP = 10000

-- bury(id, row, code, batch, run): close it as failed, and write a letter with its body, which `close` deletes, and
-- with the workers that lost it, the last of them the batch's own.
local function bury(id, row, code, batch, run)
  local kept = call('HMGET', P .. 'request:' .. id, 'body', 'lost_by')
  row.buried = true
  if not close(id, row, 'failed', code, batch, run) then return end
  local workers = {}
  for worker in string.gmatch((kept[2] or '') .. ' ' .. batch.worker, '%S+') do workers[#workers + 1] = worker end
  local p = party(row)
  letters[#letters + 1] = {'d', id, p.customer, p.tier, code, attempts(batch), workers, kept[1] or ''}
  call('LPUSH', P .. 'dlq', id)
  call('LTRIM', P .. 'dlq', 0, DLQ_CAP - 1)
end
