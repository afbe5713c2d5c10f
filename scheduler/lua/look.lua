#!lua flags=allow-oom
-- look: what waits and what runs, for a dispatcher; and what is worth waking it for, where it means to sleep.
-- KEYS[1] leases. ARGV: 1 prefix, 2 packed tier names; before a sleep also: 3 dispatcher id, 4 waiting requests that wake
--   (0: none), 5 ready batches at which a worker wakes (-1: once nothing runs, -2: never), 6 ms that this holds.
-- Returns packed queues as they are with the wish in place: what they hold already pushes no token any more.
-- include: prelude, protocol, queues
if other_protocol() then return other_protocol() end
if ARGV[3] then
  redis.call('HSET', P .. 'wake_at', ARGV[3], ARGV[4] .. ' ' .. (now + ARGV[6]) .. ' ' .. ARGV[5])
  redis.call('PEXPIRE', P .. 'wake_at', ARGV[6])
  redis.call('DEL', P .. 'wake') -- whatever it was pushed for is seen now
end
return cmsgpack.pack(queues(cmsgpack.unpack(ARGV[2])))
