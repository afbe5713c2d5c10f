#!lua flags=allow-oom
-- push_back: return a popped batch id that will not be claimed to the head of batch_queue.
-- KEYS[1] leases. ARGV: 1 prefix, 2 batch id.
-- Returns 1, or 0 if the batch is gone, claimed, or was already pushed again by the reaper.
-- include: prelude
local queue, id = P .. 'batch_queue', ARGV[2]
if call('HGET', P .. 'batch:' .. id, 'state') ~= 'formed' or call('LPOS', queue, id) then return 0 end
call('LPUSH', queue, id)
return 1
