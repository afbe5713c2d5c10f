#!lua flags=allow-oom
-- form_batch: move the picked ids of the tier queues into one new batch and make it ready, all or nothing.
-- Refuses while enough batches are ready (late binding). Ids that must not run any more end here instead.
-- KEYS[1] leases. ARGV: batch_id; packed_picks {{tier, count}...} in order of priority; lookahead in batches; lease_ms;
--   packed_tiers: their names; keep_ms of a batch; gone_ms without a heartbeat after which a gateway is lost; max_tokens of a
--   batch (0: no limit); aged_ms of waiting after which a request is not skipped for its length; fewest: number of queued
--   requests at which all of them leave, if they fit the first pick and a worker is idle (0: none is enough); pace_ms since the
--   last batch after which one request is enough (-1: never). If neither is met, none leaves; 0 and -1: no condition; kept_free:
--   with slots, those that such requests leave free.
-- With slots, the batch has at most as many requests as slots are free, and no more than the fewest that a worker has.
-- Returns packed {size, dropped, queues}: requests in the new batch, ids that ended or are damaged, and the queues afterwards.
-- include: prelude, slots, protocol, row, ratelimit/metered, refund, backlogs, settlement, finalize, owners, queues, fair_order, batch_selection, batch, retry_budget, coalescing_keys, followers
if protocol_error() then return protocol_error() end
local READY_MAX = 8
local size, tiers_used, formed = 0, {}, false

-- add_to_batch(tier, ids): adds ids to the batch, oldest first, as if each had been moved by RPOPLPUSH.
local function add_to_batch(tier, ids)
  if #ids == 0 then return end
  local prefix = P .. 'request:'
  for _, request_id in ipairs(ids) do call('HSET', prefix .. request_id, 'state', 'processing', 'batch', batch_id) end
  local list = P .. 'inflight:' .. tier .. ':' .. batch_id
  call('LPUSH', list, unpack(ids))
  tiers_used[#tiers_used + 1], size = tier, size + #ids
end

-- is_due(pace_ms): whether no batch was formed for that time, or TIME was set back since the last one.
local function is_due(pace_ms)
  if pace_ms < 0 then return false end
  -- By pcall, because a Redis user with older ACL rules has no access to this key.
  local last = redis.pcall('GET', P .. 'formed_at')
  local since = type(last) == 'string' and now - (tonumber(last) or 0)
  return not since or since < 0 or since >= pace_ms
end

local room = slots.view()

-- all_may_leave(picks, fewest, pace_ms): whether enough requests are queued, fit one batch, and a worker is idle or has the slots.
local function all_may_leave(picks, fewest, pace_ms)
  local waiting = 0
  for _, pick in ipairs(picks) do
    waiting = waiting + call('LLEN', P .. 'queue:' .. pick[1]) + backlogs.waiting[pick[1]]
  end
  if waiting == 0 or waiting > picks[1][2] then return false end
  if not (fewest > 0 and waiting >= fewest or is_due(pace_ms)) then return false end
  if room then return waiting <= math.min(room[1] - kept_free, room[3]) end
  return call('ZCARD', P .. 'leases') < tonumber(call('GET', P .. 'healthy_gpu_count') or 0)
end

-- in_free_slots(picks, room) -> the picks, with no more places than a worker has free slots; the last tiers lose theirs first.
local function in_free_slots(picks, room)
  local left, bounded = math.min(room[1], room[3]), {}
  for i, pick in ipairs(picks) do
    local depth = call('LLEN', P .. 'queue:' .. pick[1]) + backlogs.waiting[pick[1]]
    bounded[i] = {pick[1], math.min(pick[2], depth, left)}
    left = left - bounded[i][2]
  end
  return bounded
end

-- overtakes(tier): whether all ready batches have requests of this tier only.
local function overtakes(tier)
  for _, ready in ipairs(call('LRANGE', P .. 'batch_queue', 0, READY_MAX)) do
    if call('HGET', P .. 'batch:' .. ready, 'tiers') ~= tier then return false end
  end
  return call('LLEN', P .. 'batch_queue') <= READY_MAX
end

-- empty_part(picks) -> the part of the places that no request of a batch of quiet customers has; all are of one tier.
local function empty_part(picks)
  for _, pick in ipairs(picks) do
    if pick[1] == tiers_used[1] then return math.max(0, 1 - size / pick[2]) end
  end
end

local picks, tiers = cmsgpack.unpack(packed_picks), cmsgpack.unpack(packed_tiers)
local has_condition = fewest > 0 or pace_ms >= 0
backlogs.counts(tiers)
local ready = not room and call('LLEN', P .. 'batch_queue') or nil
local may_form = room and room[1] > 0 or ready and ready < lookahead
if may_form and (not has_condition or all_may_leave(picks, fewest, pace_ms)) then
  if room then
    -- No member waits for another one, so quiet customers need no batch of their own.
    picks, apart.allowed = in_free_slots(picks, room), false
    max_tokens = 0
  end
  local selected = max_tokens > 0 and select_by_length(picks, max_tokens, aged_ms) or select_oldest(picks, not room)
  for i, pick in ipairs(picks) do add_to_batch(pick[1], selected[i]) end
end
if size > 0 then
  local fields = {'state', 'formed', 'size', size, 'tiers', table.concat(tiers_used, ' '), 'at', formed_at}
  local function add(name, value) fields[#fields + 1], fields[#fields + 2] = name, value end
  if has_estimates then add('costs', cmsgpack.pack(estimates)) end
  if apart.used then add('empty', empty_part(picks)) end
  if room then
    add('slots', '1')
    slots.formed(batch_id, size)
  end
  call('HSET', P .. 'batch:' .. batch_id, unpack(fields))
  keep({id = batch_id, tiers = tiers_used, last = latest_deadline, fresh = true}, keep_ms)
  call('ZADD', P .. 'leases', now + lease_ms, batch_id)
  formed = not redis.pcall('SET', P .. 'formed_at', now, 'PX', 60000).err
  -- The tail: retried batches are at the head. Requests of quiet customers were not there when the ready batches were formed.
  ready = call(apart.first and overtakes(tiers_used[1]) and 'LPUSH' or 'RPUSH', P .. 'batch_queue', batch_id)
end
call('DEL', P .. 'wake') -- its requests are in the reply
flush()
local known = {waiting = #groups_ended == 0, ready = ready, formed = formed, no_slots = not room}
return cmsgpack.pack({size, dropped, queues(tiers, known)})
