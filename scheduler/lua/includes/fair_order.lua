-- fair_order: moves ids of the backlogs into their tier queue, in fair order (needs prelude and backlogs).
-- `charged[id]`: the flow of an id that was moved in this call; its customer was charged the mean cost of its requests.
local charged, estimates, has_estimates, moved_flows = {}, {}, false, {}

-- place(entries, flow): inserts a flow into the entries, which are sorted by tag.
local function place(entries, flow)
  local i = 1
  while entries[i] and entries[i].tag <= flow.tag do i = i + 1 end
  table.insert(entries, i, flow)
end

-- lowest_tags(tier, count) -> the flows with the lowest tags. More than `count` cannot be chosen for so many ids.
local function lowest_tags(tier, count)
  local stored, entries = call('ZRANGE', P .. 'backlogs:' .. tier, 0, count - 1, 'WITHSCORES'), {}
  for i = 1, #stored, 2 do
    local flow = backlogs.flow(tier, stored[i])
    flow.tag = tonumber(stored[i + 1])
    entries[#entries + 1] = flow
  end
  return entries
end

-- move_up(tier, count) -> how many ids were moved into the tier queue, at most `count`.
local function move_up(tier, count)
  local entries, fair, ids, kept = lowest_tags(tier, count), backlogs.tier(tier), {}, {}
  while #ids < count and entries[1] do
    local flow = table.remove(entries, 1)
    local step, others = flow.cost / flow.weight, entries[1] and entries[1].tag - flow.tag or math.huge
    local wanted = math.min(count - #ids, math.max(1, math.floor(others / step) + 1))
    local popped = call('RPOP', flow.list, wanted) or {}
    for _, id in ipairs(popped) do ids[#ids + 1], charged[id] = id, flow end
    fair.v = math.max(fair.v, flow.tag + math.max(0, #popped - 1) * step)
    flow.tag, kept[flow.customer] = flow.tag + #popped * step, flow
    estimates[tier .. ' ' .. flow.customer], has_estimates = flow.cost, true
    if #popped < wanted then backlogs.leave(tier, flow) kept[flow.customer] = nil else place(entries, flow) end
  end
  for _, flow in pairs(kept) do call('ZADD', P .. 'backlogs:' .. tier, flow.tag, flow.customer) end
  if #ids == 0 then return 0 end
  call('HSET', P .. 'fair:' .. tier, 'v', fair.v)
  call('PEXPIRE', P .. 'fair:' .. tier, backlogs.FAIR_MS)
  backlogs.remove(tier, #ids)
  call('LPUSH', P .. 'queue:' .. tier, unpack(ids))
  return #ids
end

-- credit(tier, id): an id that was moved does not run.
local function credit(tier, id)
  local flow = charged[id]
  if not flow then return end
  local step = flow.cost / flow.weight
  flow.tag, charged[id] = flow.tag - step, nil
  if not call('ZADD', P .. 'backlogs:' .. tier, 'XX', 'INCR', -step, flow.customer) then call('HSET', flow.key, 'tag', flow.tag) end
end
