#!lua flags=allow-oom
-- push_back: return a popped batch id that will not be claimed to the head of batch_queue.
-- KEYS[1] leases. ARGV: batch_id.
-- Returns 1, or 0 if the batch is gone, claimed, or was already pushed again by the reaper.
-- include: prelude
local queue = P .. 'batch_queue'
if call('HGET', P .. 'batch:' .. batch_id, 'state') ~= 'formed' or call('LPOS', queue, batch_id) then return 0 end
call('LPUSH', queue, batch_id)
return 1
