#!lua flags=allow-oom
-- gateway_beat: the heartbeat of a gateway; without this key its queued requests end before they reach a GPU.
-- KEYS[1] leases. ARGV: 1 prefix, 2 gateway id, 3 packed stats, 4 ms that the heartbeat is valid, 5 number of rejections kept
--   for this gateway, 6 ms that they are kept, 7... packed rejections since its last heartbeat, oldest first.
-- Returns {epoch in microseconds, used share of maxmemory, maxmemory-policy}. If the epoch changed, Redis may have lost data
-- (see epoch); a share near 1 means that admission will soon be rejected. The share is 0 without a memory limit.
-- include: prelude, protocol, epoch
if protocol_error() then return protocol_error() end
store_protocol()
local key = P .. 'gateway:' .. ARGV[2]
call('HSET', key, 'stats', ARGV[3], 'last_heartbeat', now)
call('PEXPIRE', key, tonumber(ARGV[4]))
call('ZADD', P .. 'gateways', now, ARGV[2])
call('ZREMRANGEBYSCORE', P .. 'gateways', '-inf', now - tonumber(ARGV[4]))
local memory = call('INFO', 'memory')
local used, limit = string.match(memory, 'used_memory:(%d+)'), string.match(memory, 'maxmemory:(%d+)')
local share = tonumber(limit or 0) > 0 and used / limit or 0

-- The list outlives the gateway, so a separate index names it. It is not written when memory is short.
if #ARGV > 6 and share < 0.9 then
  local rejections, lists, keep_ms = P .. 'refusals:' .. ARGV[2], P .. 'refusal_lists', tonumber(ARGV[6])
  call('LPUSH', rejections, unpack(ARGV, 7))
  call('LTRIM', rejections, 0, tonumber(ARGV[5]) - 1)
  call('PEXPIRE', rejections, keep_ms)
  call('ZADD', lists, now, ARGV[2])
  call('ZREMRANGEBYSCORE', lists, '-inf', now - keep_ms)
  call('PEXPIRE', lists, keep_ms)
end
return {begin_epoch(), string.format('%.4f', share), string.match(memory, 'maxmemory_policy:([%w-]+)') or ''}
