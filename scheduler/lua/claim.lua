#!lua flags=allow-oom
-- claim: a worker takes a ready batch: owner, fencing token, running lease, one attempt counted.
-- KEYS[1] leases. ARGV: 1 prefix, 2 batch id, 3 worker id, 4 token, 5 lease ms.
-- Returns nil where the batch is not there to be claimed, else {id, ms left, attempt, body, id, ...}: the members
--   that may run; those whose time is up end here, and a batch that is left empty is closed.
-- include: prelude, wake, ending, batch
local batch = load_batch(ARGV[2])
if not batch or batch.state ~= 'formed' then return false end
redis.call('HSET', P .. 'batch:' .. batch.id, 'state', 'running', 'worker', ARGV[3], 'token', ARGV[4])
batch.worker = ARGV[3]
lease(batch, tonumber(ARGV[5]))
local out = {}
each_member(batch, function(id, row, list)
  local left = row[DEADLINE] - now
  if left <= 0 then
    close(id, row, 'failed', 'deadline_exceeded', batch, NO_RUN)
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
wake()
return out
