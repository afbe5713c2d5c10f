#!lua flags=allow-oom
-- gateway_beat: the heartbeat of a gateway; without this key its queued requests end before they reach a GPU.
-- KEYS[1] leases. ARGV: gateway_id; packed_stats; gone_ms that the heartbeat is valid; max_rejections that are kept for this
--   gateway, and keep_ms of them; rejections since its last heartbeat, each packed, oldest first.
-- Returns {epoch in microseconds, used share of maxmemory, maxmemory-policy}. If the epoch changed, Redis may have lost data
-- (see epoch); a share near 1 means that admission will soon be rejected. The share is 0 without a memory limit.
-- include: prelude, protocol, epoch
if protocol_error() then return protocol_error() end
store_protocol()
local key = P .. 'gateway:' .. gateway_id
call('HSET', key, 'stats', packed_stats, 'last_heartbeat', now)
call('PEXPIRE', key, gone_ms)
call('ZADD', P .. 'gateways', now, gateway_id)
call('ZREMRANGEBYSCORE', P .. 'gateways', '-inf', now - gone_ms)
local memory = call('INFO', 'memory')
local used, limit = string.match(memory, 'used_memory:(%d+)'), string.match(memory, 'maxmemory:(%d+)')
local share = tonumber(limit or 0) > 0 and used / limit or 0

-- The list outlives the gateway, so a separate index names it. It is not written when memory is short.
if #rejections > 0 and share < 0.9 then
  local list, lists = P .. 'refusals:' .. gateway_id, P .. 'refusal_lists'
  call('LPUSH', list, unpack(rejections))
  call('LTRIM', list, 0, max_rejections - 1)
  call('PEXPIRE', list, keep_ms)
  call('ZADD', lists, now, gateway_id)
  call('ZREMRANGEBYSCORE', lists, '-inf', now - keep_ms)
  call('PEXPIRE', lists, keep_ms)
end
return {begin_epoch(), string.format('%.4f', share), string.match(memory, 'maxmemory_policy:([%w-]+)') or ''}
