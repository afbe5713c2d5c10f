#!lua flags=allow-oom
-- expire: end requests that waited too long, and remove ids of ended requests from the tier queues and backlogs, oldest
-- first.
-- KEYS[1] leases. ARGV: packed_tiers: their names; limit of ids per tier and call.
-- Returns {ended, swept, 1 if `share` has more to do, else 0, recorded damaged rows}. Customers of one tier may have different
-- queue timeouts, so the whole window is checked: overdue requests behind one that is in time also end, and stay as dead
-- entries until they are the oldest.
-- include: prelude, slots, protocol, row, ratelimit/metered, refund, backlogs, settlement, finalize, batch, retry_budget, coalescing_keys, followers
if protocol_error() then return protocol_error() end
local ended_now, swept, tiers = 0, 0, cmsgpack.unpack(packed_tiers)
local BACKLOGS = 32 -- of each tier and call, in turn

-- sweep(list, count) -> how many of the `count` oldest ids of the list were removed.
local function sweep(list, count)
  local ids, removed = redis.pcall('LRANGE', list, -count, -1), 0 -- a list of a wrong type is empty
  local all_ended = true -- whether all ids so far, from the oldest, have ended
  for i = #ids, 1, -1 do
    local row = read_row(ids[i])
    local is_waiting = row[STATE] == 'queued'
    if is_waiting and now >= math.min(row[DEADLINE], row[QUEUE_DEADLINE]) then
      finalize(ids[i], row, 'failed', now >= tonumber(row[DEADLINE]) and 'deadline_exceeded' or 'queue_timeout', NO_BATCH, NO_RUN)
      ended_now, is_waiting = ended_now + 1, false
    elseif not is_waiting and all_ended then
      swept = swept + 1
    end
    all_ended = all_ended and not is_waiting
    if all_ended then
      call('RPOP', list)
      removed = removed + 1
    end
  end
  return removed
end

-- sweep_backlogs(tier): of the next customers in the order of their tags, after those of the last call.
local function sweep_backlogs(tier)
  local index, fair = P .. 'backlogs:' .. tier, P .. 'fair:' .. tier
  local start = tonumber(call('HGET', fair, 'swept') or 0)
  local customers = call('ZRANGE', index, start, start + BACKLOGS - 1)
  call('HSET', fair, 'swept', #customers < BACKLOGS and 0 or start + BACKLOGS)
  for _, customer in ipairs(customers) do
    local flow = backlogs.flow(tier, customer)
    local removed, name, of_keys = sweep(flow.list, math.ceil(limit / #customers)), tier .. ':' .. customer, 0
    for _, key in ipairs(flow.keyed and call('ZRANGE', P .. 'backlogs:' .. name, 0, BACKLOGS - 1) or {}) do
      of_keys = of_keys + sweep(P .. 'backlog:' .. name .. ':' .. key, math.ceil(limit / #customers))
    end
    backlogs.remove(name, of_keys)
    removed = removed + of_keys
    local tag = call('ZSCORE', index, customer) -- none if `remove` took it, with others without ids, from the index
    if tag and backlogs.length(tier, flow) == 0 then
      if flow.keyed then call('DEL', P .. 'backlogs:' .. name, P .. 'fair:' .. name) end
      flow.tag = tonumber(tag)
      backlogs.leave(tier, {flow})
    end
    backlogs.remove(tier, removed)
  end
end

local function sweep_all()
  for i, count in ipairs(backlogs.counts(tiers)) do
    sweep(P .. 'queue:' .. tiers[i], limit)
    if count > 0 then sweep_backlogs(tiers[i]) end
  end
end

-- After an error too, the requests that have ended by then have their records and replies.
local is_swept, problem = pcall(sweep_all)
flush()
if not is_swept then error(problem) end
return {ended_now, swept, call('EXISTS', P .. 'sharing'), call('LLEN', P .. 'damaged')}
