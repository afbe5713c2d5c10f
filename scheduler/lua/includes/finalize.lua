-- finalize: the one compare-and-set into a terminal state, with reply, audit record and refund (needs prelude, row, refund and settlement).
-- finalize(id, row, ...) ends a row that was read, once; flush() writes the audit records and publishes one message per gateway.
local NO_BATCH = {id = '', size = 0, worker = '', losses = 0}
local NO_RUN = {-1, 0, 0, cmsgpack.pack(-1, 0, '', '', 0, 'stop')}
-- Fields of a run (and COST). TAIL: the last six fields of a reply, packed; if PACKED, followed by '' and the cost, 10 bytes.
local GPU_MS, USED, BYTES, TAIL, PACKED = 1, 2, 3, 4, 6
-- charged_cost(...) -> the GPU time in ms that a request pays, nil if it is not charged: its share of the batch, also if a part of
-- its stream was delivered; of a coalesced run an equal part for the primary and each follower. Parts of followers that were
-- cancelled are not charged. A completed request that is not coalesced pays run[COST].
local function charged_cost(id, row, account, state, code, run)
  local cost = run[COST]
  if not cost or state ~= 'completed' and not CHARGED_FAILURES[code] and run[USED] <= 0 then return nil end
  if not account.coalesced or row[STATE] == 'riding' then return cost end
  local followers = redis.pcall('LLEN', P .. 'riders:' .. id)
  return type(followers) == 'number' and cost / (1 + followers) or cost
end

-- The row of an ended request with minutes left is kept only until its gateway has read it, which takes seconds at most. Rows of jobs,
-- replays and followers are read later.
local LONG_LEFT_MS, ENDED_KEEP_MS = 60000, 60000
local function is_read_later(account) return account.keep_ms or account.coalesced or account.gateway == 'jobs' end

local groups_ended, dead_letters, messages, ended_primaries, now_text = {}, {}, {}, {}, string.format('%.0f', now)

-- attempts(batch): how often its members ran, including this run. They were lost together each time before.
local function attempts(batch) return batch.losses + (batch.state == 'running' and 1 or 0) end

-- set_terminal(id, state, code, reply): writes a terminal state, and the reply if there is one, to an open row. Deletes the body.
local function set_terminal(id, state, code, reply)
  if code == '' and reply then
    return call('HSET', REQUEST .. id, 'state', state, 'ended', now_text, 'body', '', 'reply', reply)
  end
  local fields = {'state', state, 'ended', now_text, 'body', ''}
  if code ~= '' then fields[7], fields[8] = 'code', code end
  if reply then fields[#fields + 1], fields[#fields + 2] = 'reply', reply end
  call('HSET', REQUEST .. id, unpack(fields))
end

-- leave_batch(id, row): removes a request from its batch. An empty batch is deleted by its worker or the reaper.
local function leave_batch(id, row) call('LREM', P .. 'inflight:' .. account_of(row).tier .. ':' .. row[BATCH], 1, id) end

-- group_of(batch, state, code): the constant parts of replies and of the audit record for all members of a batch with one
-- result. The record ends with a flat list of the values of each request: `each` has them packed, and `costs` the charged costs.
-- middle[queue_ms]: the part of a reply between its nonce and its tail, once it was needed.
local EACH_SIZE = 6
local function group_of(batch, state, code)
  local groups = batch.groups or {}
  local tries, group = attempts(batch), groups[code]
  if group and group.tries == tries then return group end
  local from = batch.served_from and packed[batch.served_from] or '' -- one field more, in reply and record
  group = {
    tries = tries, each = {}, costs = {}, from = from, header = from == '' and '\220\0\16' or '\220\0\17', middle = {},
    before = cmsgpack.pack(state, code, tries), after = cmsgpack.pack(batch.id, batch.size, batch.worker),
    record = '\161f' .. cmsgpack.pack(state, code, now, batch.id, batch.size, batch.worker, tries)}
  batch.groups, groups[code], groups_ended[#groups_ended + 1] = groups, group, group
  return group
end


-- reply_tail(group, run, cost) -> header and tail of a reply whose tail is not as its worker packed it. TAIL and COST become those of
-- the reply without it.
local WITH_COST = '\220\0\18'
local function reply_tail(group, run, cost)
  if run[PACKED] then run[TAIL], run[PACKED] = sub(run[TAIL], 1, -11), false end
  if not cost then return group.header, run[TAIL] .. group.from end
  run[COST] = cost
  return WITH_COST, run[TAIL] .. (group.from == '' and packed[''] or group.from) .. packed[cost]
end

-- finalize(...) -> true once; false if the request has ended before or is unknown.
local function finalize(id, row, state, code, batch, run)
  if not OPEN[row[STATE]] then return false end
  local account, group, nonce, latency_ms = accounts[row[WHO]] or account_of(row), batch.group, sub(row[ENV], 54), now - row[AT]
  if not group or group.code ~= code or group.state ~= batch.state or group.losses ~= batch.losses then
    group = group_of(batch, state, code)
    group.code, group.state, group.losses, batch.group = code, batch.state, batch.losses, group
  end
  local cost, queue_ms, header, tail = run[COST], batch.formed and batch.formed - row[AT] or -1, WITH_COST, run[TAIL]
  if state ~= 'completed' or account.coalesced then cost = charged_cost(id, row, account, state, code, run) end
  if not run[PACKED] or cost ~= run[COST] or account.coalesced then header, tail = reply_tail(group, run, cost) end
  local named, middle, message, n = str_header[#id] .. id, group.middle[queue_ms], messages[account.gateway], #group.each + 1
  if not middle then
    middle = group.before .. packed[queue_ms] .. group.after
    group.middle[queue_ms] = middle
  end
  local reply = header .. named .. packed[account.customer] .. str_header[#nonce] .. nonce .. middle .. tail
  set_terminal(id, state, code, reply)
  if row[DEADLINE] - now > LONG_LEFT_MS and not is_read_later(account) then
    call('PEXPIRE', P .. 'request:' .. id, ENDED_KEEP_MS)
  end
  if account.keep_ms then
    pcall(record_replay, id, account.customer, account.keep_ms, row[DEADLINE], is_replayable(state, code) and #reply)
  end
  refund(id, row, account, state, code, run[USED], cost or batch.served_from and 0 or run[COST])
  if batch.costs or batch.served_from then settle(batch, account, state, cost) end
  group.is_charged = group.is_charged or cost
  group.each[n] = named .. packed[latency_ms] .. packed[queue_ms] .. packed[run[GPU_MS]] .. packed[run[USED]] .. packed[run[BYTES]]
  group.costs[n] = packed[cost or -1]
  if message then message[#message + 1] = reply else messages[account.gateway] = {reply} end
  if account.coalesced and row[STATE] ~= 'riding' then
    ended_primaries[#ended_primaries + 1] = {id, row, state, code, batch, {unpack(run, 1, PACKED)}}
  end
  return true
end

-- finalize_damaged(): quarantined rows have failed: releases their leases, refunds them, and reports their end to gateway and
-- audit, if the row still names them.
local function finalize_damaged()
  for i, entry in ipairs(damaged) do
    local row = {false, false, entry.env, entry.who}
    local id, account, group = entry.id, account_of(row), group_of(NO_BATCH, 'failed', 'internal_error')
    local accepted_at, nonce = number[sub(entry.env or '', 1, 13)] or now, sub(entry.env or '', 54)
    local n = #group.each + 1
    group.each[n], group.costs[n] = str_header[#id] .. id .. cmsgpack.pack(now - accepted_at, -1, -1, 0, 0), packed[-1]
    if account then
      row[ENV] = entry.env or ''
      refund(id, row, account, 'failed', 'internal_error', -1)
      local message = messages[account.gateway] or {}
      message[#message + 1] = '\220\0\16' ..
        cmsgpack.pack(id, account.customer, nonce, 'failed', 'internal_error', 0, -1, '', 0, '') .. NO_RUN[TAIL]
      messages[account.gateway] = message
    end
    ended_primaries[#ended_primaries + 1] = {id, row, 'failed', 'internal_error', NO_BATCH, false}
    damaged[i] = nil
  end
end

local function flush()
  finalize_damaged()
  if #groups_ended == 0 then return end
  apply_refunds()
  apply_settlements()
  for i, group in ipairs(groups_ended) do
    local header, tail = group.from == '' and '\153' or '\154', group.from
    if group.is_charged then header, tail = '\155', (tail == '' and packed[''] or tail) .. pack_array(group.costs) end
    groups_ended[i] = header .. group.record .. pack_array(group.each, EACH_SIZE) .. tail
  end
  call('LPUSH', P .. 'outbox', pack_array(groups_ended))
  for _, record in ipairs(dead_letters) do call('LPUSH', P .. 'outbox', cmsgpack.pack({record})) end -- one each: they are large
  for gateway, replies in pairs(messages) do call('PUBLISH', P .. 'responses:' .. gateway, pack_array(replies)) end
end
