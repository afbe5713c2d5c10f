#!lua flags=allow-oom
-- look: return the queues and the numbers of batches to a dispatcher, and store the condition that wakes it.
-- KEYS[1] leases. ARGV: packed_tiers: their names; before a sleep also: dispatcher_id; depth: queued requests that wake it (0: none);
--   ready: batches at which a worker wakes it (-1: the first idle worker does, -2: none, -3: a free slot does); hold_ms that this
--   is valid.
-- Returns the packed queues after the condition is stored: the requests in them push no wake token any more.
-- include: prelude, slots, protocol, backlogs, queues
if protocol_error() then return protocol_error() end
local EVENTS = {['-1'] = '0 idle', ['-3'] = '0 slot'}
if dispatcher_id then
  local event = EVENTS[ready] or ready
  call('HSET', P .. 'wake_at', dispatcher_id, depth .. ' ' .. (now + hold_ms) .. ' ' .. event)
  call('PEXPIRE', P .. 'wake_at', hold_ms)
  call('DEL', P .. 'wake') -- its requests are in the reply
end
return cmsgpack.pack(queues(cmsgpack.unpack(packed_tiers), {}))
