#!lua flags=allow-oom
-- sleep: a dispatcher says what is worth waking it for, before it waits: so many requests in the tier queues.
-- Without this, every admission would wake it to look at a batch that is not full yet.
-- KEYS[1] leases. ARGV: 1 prefix, 2 dispatcher id, 3 depth that wakes (0: only a worker's doing), 4 ms that this holds,
--   5 packed tiers.
-- Returns the depth now; where it has reached what wakes, nobody may push a token for it any more: look again at once.
-- include: prelude
redis.call('HSET', P .. 'wake_at', ARGV[2], ARGV[3] .. ' ' .. (now + ARGV[4]))
redis.call('PEXPIRE', P .. 'wake_at', ARGV[4])
local depth = 0
for _, tier in ipairs(cmsgpack.unpack(ARGV[5])) do depth = depth + redis.call('LLEN', P .. 'queue:' .. tier) end
return depth
