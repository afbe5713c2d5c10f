#!lua flags=allow-oom
-- release: a stopping worker hands a running batch back clean; no attempt is counted, order is kept.
-- KEYS[1] leases. ARGV: 1 prefix, 2 batch id, 3 token.
-- Returns the number of ids that stand again at the head of their tier queues, or -1 where the token does not own it.
-- include: prelude, wake, ending, batch
local batch = load_batch(ARGV[2])
if not batch or batch.state ~= 'running' or batch.token ~= ARGV[3] then return -1 end
local back = {}
each_member(batch, function(id, row)
  redis.call('HINCRBY', P .. 'request:' .. id, 'tries', -1)
  redis.call('HSET', P .. 'request:' .. id, 'state', 'queued', 'qdl', row[DEADLINE]) -- it was picked in time
  redis.call('HDEL', P .. 'request:' .. id, 'batch', 'formed')
  back[#back + 1] = {P .. 'queue:' .. row[TIER], id}
end)
for i = #back, 1, -1 do redis.call('RPUSH', back[i][1], back[i][2]) end -- youngest first: the oldest ends up at the head
drop_batch(batch)
wake()
return #back
