#!lua flags=allow-oom
-- worker_beat: the heartbeat of a worker.
-- KEYS[1] leases. ARGV: worker_id; in a complete heartbeat also: status, utilization 0..1, in_flight requests, packed_heartbeat,
--   keep_ms of it; of a worker with slots also: slot_count, and free_slots, nil if a claim is in progress.
-- Returns -1 if a complete heartbeat is needed, else whether the worker may claim: 0 yes, 1 no, it is cordoned, 2 as before,
--   because Redis has lost the list of cordons; with several cells {that, `moves`}, with an objective for the milliseconds per
--   token {that, `moves` or nil, `tpot_ms`}. A scheduler is woken if the worker can run batches now, or no longer, and finds that
--   in `healthy_gpu_count`: the next census is up to a tenth of a second later.
-- include: prelude, protocol, slots, wake, worker_status
if protocol_error() then return protocol_error() end
local key = P .. 'gpu:' .. worker_id

local function reply()
  local members = call('SMISMEMBER', P .. 'cordoned', '', worker_id)
  local cordon = members[1] == 0 and 2 or members[2]
  local moves = redis.pcall('GET', P .. 'moves') -- older ACL rules do not allow it
  local tpot_ms = redis.pcall('GET', P .. 'tpot_ms')
  moves = type(moves) == 'string' and moves
  if type(tpot_ms) == 'string' then return {cordon, moves, tpot_ms} end
  return moves and {cordon, moves} or cordon
end

-- count(change): adds 1 or -1 to the number of healthy workers. By pcall: older ACL rules do not allow it.
local function count(change)
  local counted = redis.pcall('GET', P .. 'healthy_gpu_count')
  local healthy = type(counted) == 'string' and tonumber(counted) + change
  -- After a loss of data the last count is valid, which has workers that are not known again yet.
  if healthy and healthy >= 0 and (change < 0 or healthy <= call('ZCARD', P .. 'gpus')) then
    redis.pcall('INCRBY', P .. 'healthy_gpu_count', change)
  end
end

if not status then
  if call('HSET', key, 'last_heartbeat', now) == 1 then
    call('DEL', key)
    return -1
  end
  call('ZADD', P .. 'gpus', 'XX', now, worker_id)
  return reply()
end
local old_status = call('HGET', key, 'status')
call('HSET', key, 'status', status, 'utilization', utilization, 'in_flight', in_flight, 'last_heartbeat', now, 'beat', packed_heartbeat)
call('PEXPIRE', key, keep_ms)
call('ZADD', P .. 'gpus', now, worker_id)
local was_healthy, healthy = is_healthy(old_status), is_healthy(status)
if not healthy then slots.remove(worker_id)
elseif slot_count and slots.report(worker_id, free_slots, slot_count) then wake_for_slot() end
if was_healthy ~= healthy then
  count(healthy and 1 or -1)
  wake()
end
return reply()
