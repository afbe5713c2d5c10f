#!lua flags=allow-oom
-- cancel: a gateway ends its own requests, because the client left or the deadline passed. The first writer wins. Followers of
-- a cancelled request continue without it.
-- A queued id stays in its tier list as a dead entry, which form_batch and expire skip: removing it would be O(length).
-- KEYS[1] leases. ARGV: 1 prefix, 2 packed {{id, code, running, delivered, used}...}; `running`: end it also while it runs; its
--   worker receives this with the next renewal. All codes except cancelled do so. `delivered`: the client got this code as
--   response, so that another end is revoked. `used`: tokens of a stream that were delivered, else 0.
-- Returns one bulk per id: the stored reply, or '' if it was left running (cancelled) or is unknown.
-- include: prelude, row, ratelimit/metered, refund, revoke, backlogs, settlement, finalize, batch, retry_budget, coalescing_keys, followers
local replies = {}
for i, request in ipairs(cmsgpack.unpack(ARGV[2])) do
  local id, code, row = request[1], request[2], read_row(request[1])
  local batch, used, revoked = NO_BATCH, request[5] or 0, nil
  if is_open(row) and (row[STATE] ~= 'processing' or code ~= 'cancelled' or request[3]) then
    if row[STATE] == 'processing' then
      local stored = load_batch(row[BATCH]) or NO_BATCH
      batch = {id = row[BATCH], size = 0, worker = '', state = stored.state, losses = stored.losses, formed = stored.formed,
        costs = stored.costs}
      leave_batch(id, row)
    end
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
return replies
