#!lua flags=allow-oom
-- release: a stopping worker returns a running batch; no attempt is counted, and the order is kept. A batch that was lost
-- before stays together: its requests may be the cause of the loss, and must not join new ones.
-- KEYS[1] leases. ARGV: 1 prefix, 2 batch id, 3 token, 4 lease ms, 5 ms that a batch is kept.
-- Returns the number of ids that are queued again, first in their tier queues or as a batch; -1 if the token does not own it.
-- include: prelude, wake, row, repaying, ending, batch, retry_budget, same, followers
local batch = load_batch(ARGV[2])
if not batch or batch.state ~= 'running' or batch.token ~= ARGV[3] then return -1 end
local back, suspect = {}, batch.losses > 0
each_member(batch, function(id, row)
  local key = P .. 'request:' .. id
  back[#back + 1] = {P .. 'queue:' .. party(row).tier, id}
  if suspect then return end
  local env = row[ENV]
  call('HSET', key, 'state', 'queued', 'env', sub(env, 1, 28) .. sub(env, 15, 27) .. sub(env, 42)) -- its queue timeout no longer applies
  call('HDEL', key, 'batch')
end)
if suspect and #back > 0 then
  redis.call('LREM', P .. 'batch_queue', 0, batch.id)
  stand_first(batch, #back, tonumber(ARGV[4]), tonumber(ARGV[5]))
else
  for i = #back, 1, -1 do redis.call('RPUSH', back[i][1], back[i][2]) end -- newest first, so that the oldest is at the head
  drop_batch(batch)
end
wake()
flush()
return #back
