#!lua flags=allow-oom
-- cancel: a gateway ends its own requests, because the client left or the deadline passed. The first writer wins. Followers of
-- a cancelled request continue without it.
-- A request that runs in a slot is only marked when its client leaves: its worker, which reads its list `stops:<worker>`, ends
-- the run and reports what it used. One whose batch waits for a claim ends at once. One with an Idempotency-Key, or that may have
-- followers, goes on.
-- At its deadline, a request that waits for longer than its queue timeout, because no process ends it, fails with that, as in expire.
-- A job has no queue timeout: the two deadlines are the same.
-- A queued id stays in its tier list as a dead entry, which form_batch and expire skip: removing it would be O(length).
-- KEYS[1] leases. ARGV: packed_requests {{id, code, running, delivered, used}...}; `running`: end it also while it runs; its
--   worker receives this with the next renewal. All codes except cancelled do so. `delivered`: the client got this code as
--   response, so that another end is revoked. `used`: tokens of a stream that were delivered, else 0.
-- Returns one bulk per id: the stored reply, or '' if it was left running (cancelled) or is unknown.
-- include: prelude, slots, row, ratelimit/metered, refund, revoke, backlogs, settlement, finalize, batch, retry_budget, coalescing_keys, followers
local replies, stops, STOPS_MS = {}, {}, 10000

-- stop(worker, id): the worker should end the run of this request.
local function stop(worker, id)
  if worker == '' then return end
  local ids = stops[worker] or {}
  stops[worker], ids[#ids + 1] = ids, id
end

-- left_batch(code, row, running) -> the batch with slots of a request whose client leaves it; nil for any other end.
local function left_batch(code, row, running)
  if code ~= 'cancelled' or row[STATE] ~= 'processing' then return nil end
  local account = account_of(row)
  if account.coalesced or account.keep_ms and not running then return nil end
  local stored = load_batch(row[BATCH])
  return stored and stored.slots and stored
end

for i, request in ipairs(cmsgpack.unpack(packed_requests)) do
  local id, code, row = request[1], request[2], read_row(request[1])
  local batch, used, revoked = NO_BATCH, request[5] or 0, nil
  local left = left_batch(code, row, request[3])
  if left and left.state == 'running' then
    call('HSET', P .. 'request:' .. id, 'left', used)
    stop(left.worker, id)
  elseif is_open(row) and (left or row[STATE] ~= 'processing' or code ~= 'cancelled' or request[3]) then
    if row[STATE] == 'processing' then
      local stored = load_batch(row[BATCH]) or NO_BATCH
      batch = {id = row[BATCH], size = 0, worker = '', state = stored.state, losses = stored.losses, formed = stored.formed,
        costs = stored.costs}
      if stored.slots then stop(stored.worker, id) end
      leave_batch(id, row)
    end
    local waits = row[STATE] == 'queued' and now >= row[QUEUE_DEADLINE] and row[QUEUE_DEADLINE] < row[DEADLINE]
    if waits and code == 'deadline_exceeded' then code = 'queue_timeout' end
    finalize(id, row, 'failed', code, batch, used > 0 and {-1, used, 0, cmsgpack.pack(-1, used, '', '', 0, 'stop')} or NO_RUN)
  elseif request[4] and row[STATE] then
    revoked = revoke(id, row, code, used)
    if revoked then call('LPUSH', P .. 'outbox', cmsgpack.pack({revoked})) end
  elseif not row[STATE] and code ~= 'cancelled' then
    -- A pending admission call must find this request ended, because its client has a response.
    call('HSET', P .. 'request:' .. id, 'state', 'failed', 'code', code)
    call('PEXPIRE', P .. 'request:' .. id, 10000)
  end
  replies[i] = call('HGET', P .. 'request:' .. id, 'reply') or ''
end
apply_refunds()
messages = {} -- not published: the caller gets the replies in this call
flush()
for worker, ids in pairs(stops) do -- by pcall: a lost signal costs the rest of a run
  redis.pcall('RPUSH', P .. 'stops:' .. worker, cmsgpack.pack({ids}))
  redis.pcall('PEXPIRE', P .. 'stops:' .. worker, STOPS_MS)
end
return replies
