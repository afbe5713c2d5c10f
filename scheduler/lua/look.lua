#!lua flags=allow-oom
-- look: return the queues and the numbers of batches to a dispatcher, and store the condition that wakes it.
-- KEYS[1] leases. ARGV: 1 prefix, 2 packed tier names; before a sleep also: 3 dispatcher id, 4 queued requests that wake it
--   (0: none), 5 ready batches at which a worker wakes it (-1: the first idle worker does, -2: none, -3: a free slot does), 6 ms
--   that this is valid.
-- Returns the packed queues after the condition is stored: the requests in them push no wake token any more.
-- include: prelude, slots, protocol, backlogs, queues
if protocol_error() then return protocol_error() end
local EVENTS = {['-1'] = '0 idle', ['-3'] = '0 slot'}
if ARGV[3] then
  local event = EVENTS[ARGV[5]] or ARGV[5]
  call('HSET', P .. 'wake_at', ARGV[3], ARGV[4] .. ' ' .. (now + ARGV[6]) .. ' ' .. event)
  call('PEXPIRE', P .. 'wake_at', ARGV[6])
  call('DEL', P .. 'wake') -- its requests are in the reply
end
return cmsgpack.pack(queues(cmsgpack.unpack(ARGV[2])))
