#!lua flags=allow-oom
-- push_back: a worker popped a batch id and will not claim it; it stands at the head of the line again.
-- KEYS[1] leases. ARGV: 1 prefix, 2 batch id.
-- Returns 1, or 0 where the batch is gone, claimed, or was pushed again already by the reaper.
-- include: prelude
local queue, id = P .. 'batch_queue', ARGV[2]
if redis.call('HGET', P .. 'batch:' .. id, 'state') ~= 'formed' or redis.call('LPOS', queue, id) then return 0 end
redis.call('LPUSH', queue, id)
return 1
