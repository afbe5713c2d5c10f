#!lua flags=allow-oom
-- sleep: the dispatcher says what is worth waking it for, before it waits: so many requests in the tier queues.
-- Without this, every admission would wake it to look at a batch that is not full yet.
-- KEYS[1] leases. ARGV: 1 prefix, 2 depth that wakes (0: only a worker's doing), 3 ms that this holds, 4 packed tiers.
-- Returns the depth now; where it has reached what wakes, nobody may push a token for it any more: look again at once.
-- include: prelude
redis.call('SET', P .. 'wake_at', ARGV[2], 'PX', ARGV[3])
local depth = 0
for _, tier in ipairs(cmsgpack.unpack(ARGV[4])) do depth = depth + redis.call('LLEN', P .. 'queue:' .. tier) end
return depth
