#!lua flags=allow-oom
-- gateway_beat: a gateway says that it lives; without this key its queued work is dropped before the GPU.
-- KEYS[1] leases. ARGV: 1 prefix, 2 gateway id, 3 packed stats, 4 ms that the beat holds, 5 refusals that are kept of
--   this gateway, 6 ms that they are kept, 7... packed refusals since its last beat, oldest first.
-- Returns {epoch in microseconds, share of maxmemory in use, maxmemory-policy}: another epoch than before means that Redis may have
-- lost something (see epoch), and a share near 1 that admission will be refused soon. The share is 0 where no limit is set.
-- include: prelude, protocol, epoch
if other_protocol() then return other_protocol() end
note_protocol()
local key = P .. 'gateway:' .. ARGV[2]
redis.call('HSET', key, 'stats', ARGV[3], 'last_heartbeat', now)
redis.call('PEXPIRE', key, tonumber(ARGV[4]))
redis.call('ZADD', P .. 'gateways', now, ARGV[2])
redis.call('ZREMRANGEBYSCORE', P .. 'gateways', '-inf', now - tonumber(ARGV[4]))
local memory = redis.call('INFO', 'memory')
local used, limit = string.match(memory, 'used_memory:(%d+)'), string.match(memory, 'maxmemory:(%d+)')
local share = tonumber(limit or 0) > 0 and used / limit or 0

-- The list outlives the gateway, so an index of its own names it. The last memory is not for telling why.
if #ARGV > 6 and share < 0.9 then
  local refusals, lists, keep_ms = P .. 'refusals:' .. ARGV[2], P .. 'refusal_lists', tonumber(ARGV[6])
  redis.call('LPUSH', refusals, unpack(ARGV, 7))
  redis.call('LTRIM', refusals, 0, tonumber(ARGV[5]) - 1)
  redis.call('PEXPIRE', refusals, keep_ms)
  redis.call('ZADD', lists, now, ARGV[2])
  redis.call('ZREMRANGEBYSCORE', lists, '-inf', now - keep_ms)
  redis.call('PEXPIRE', lists, keep_ms)
end
return {begin_epoch(), string.format('%.4f', share), string.match(memory, 'maxmemory_policy:([%w-]+)') or ''}
