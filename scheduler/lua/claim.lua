#!lua flags=allow-oom
-- claim: a worker takes a ready batch: owner, fencing token, running lease, one attempt counted.
-- KEYS[1] leases. ARGV: 1 prefix, 2 batch id, 3 worker id, 4 token, 5 lease ms,
--   6 ms of silence after which a gateway is gone.
-- Returns nil where the batch is not there to be claimed, else {id, ms left, attempt, body, id, ...}: the members
--   that may run; the others (no time left, nobody waits) end here, and a batch that is left empty is closed.
-- include: prelude, wake, repaying, ending, owners, batch
local batch = load_batch(ARGV[2])
if not batch or batch.state ~= 'formed' then
  wake() -- a finish pushed no token because this id stood in line
  return false
end
redis.call('HSET', P .. 'batch:' .. batch.id, 'state', 'running', 'worker', ARGV[3], 'token', ARGV[4])
batch.worker = ARGV[3]
lease(batch, tonumber(ARGV[5]))
local out, gone_ms = {}, tonumber(ARGV[6])
each_member(batch, function(id, row, list)
  local left, code = row[DEADLINE] - now, abandoned(row, gone_ms) and 'gateway_lost'
  if left <= 0 then code = 'deadline_exceeded' end
  if code then
    close(id, row, 'failed', code, batch, NO_RUN)
    redis.call('LREM', list, 1, id)
    return
  end
  local tries = redis.call('HINCRBY', P .. 'request:' .. id, 'tries', 1)
  local n = #out
  out[n + 1], out[n + 2], out[n + 3] = id, left, tries
  out[n + 4] = redis.call('HGET', P .. 'request:' .. id, 'body')
end)
if #out == 0 then drop_batch(batch) end
flush()
wake_free()
return out
