-- fair_order: takes ids out of the backlogs, in fair order (needs prelude and backlogs).
-- `charged[id]`: the flow of an id that was taken in this call; its customer was charged the mean cost of its requests.
local charged, estimates, has_estimates = {}, {}, false

-- place(entries, flow): inserts a flow into the entries, which are sorted by tag. Usually its tag is now one of the highest.
local function place(entries, flow)
  local i = #entries
  while i > entries.first and entries[i].tag > flow.tag do i = i - 1 end
  table.insert(entries, i + 1, flow)
end

-- lowest_tags(tier, count) -> the flows with the lowest tags, one more than can be chosen for `count` ids.
local function lowest_tags(tier, count)
  local stored, entries = call('ZRANGE', P .. 'backlogs:' .. tier, 0, count, 'WITHSCORES'), {first = 1}
  for i = 1, #stored, 2 do
    local flow = backlogs.flow(tier, stored[i])
    flow.tag = tonumber(stored[i + 1])
    entries[#entries + 1] = flow
  end
  return entries
end

-- A batch takes as long as its members together. So the requests of quiet customers form a batch of their own, as long as the
-- empty places of such batches take a small part of the GPU time. Otherwise they wait for one batch of the others, in which time
-- theirs may become full, and then others fill it. `first`: their batch leaves before those that are ready.
local apart = {allowed = true, used = false, first = false}

-- select_customers(tier, entries, places) -> the highest tag of the customers that join this batch; moves entries.first behind those that
-- wait for theirs.
local function select_customers(tier, entries, places)
  local fair, count = backlogs.tier(tier), 0
  if fair.quiet == 0 or not apart.allowed and not fair.held then return math.huge end
  while entries[count + 1] and entries[count + 1].tag <= fair.v do count = count + 1 end
  if count == 0 or not entries[count + 1] then return math.huge end
  if not fair.held and (fair.apart > 0 or count >= places) then
    apart.used, apart.first = true, true
    return fair.v
  end
  apart.first = not fair.held and fair.quiet > 1
  if fair.held or fair.quiet == 1 then fair.held, entries.first = true, count + 1 end
  return math.huge
end

-- save_tags(tier, entries, gone): of the customers that still have a backlog, and of those without.
local function save_tags(tier, entries, gone)
  local fields = {}
  for i = entries.first, #entries do
    local flow = entries[i]
    if flow.moved then fields[#fields + 1], fields[#fields + 2], flow.moved = flow.tag, flow.customer, false end
  end
  if #fields > 0 then call('ZADD', P .. 'backlogs:' .. tier, unpack(fields)) end
  backlogs.leave(tier, gone)
end

-- serve(tier, count, highest, moved) -> up to `count` ids in fair order, of customers with a tag up to `highest`; moved(flow, ids)
-- is called for those of each visit.
local serve

-- pop(tier, flow, count) -> up to `count` ids of a customer; in fair order of its keys if some have a weight.
local function pop(tier, flow, count)
  if not flow.keyed then
    local ids = redis.pcall('RPOP', flow.list, count) or {}
    if ids.err then backlogs.drop(tier, flow.list) end
    return ids
  end
  local node, of_keys = tier .. ':' .. flow.customer, 0
  local others = backlogs.flow(node, '-')
  others.list = flow.list
  if call('EXISTS', flow.list) == 1 then backlogs.list(node, others, 1) end
  local ids = serve(node, count, math.huge, function(key, popped) of_keys = of_keys + (key == others and 0 or #popped) end)
  backlogs.remove(node, of_keys)
  if backlogs.length(tier, flow) == 0 then call('DEL', P .. 'backlogs:' .. node, P .. 'fair:' .. node) end
  return ids
end

-- visit(tier, entries, count, highest, moved) -> ids, in one pass over the entries.
local function visit(tier, entries, count, highest, moved)
  local QUANTA = 4 -- visits of each customer for one batch: a visit costs a command
  local fair, ids, gone = backlogs.tier(tier), {}, {}
  local least = math.max(1, math.floor(count / (QUANTA * #entries)))
  while #ids < count and entries[entries.first] and entries[entries.first].tag <= highest do
    local flow, following = entries[entries.first], entries[entries.first + 1]
    local step, others = flow.cost / flow.weight, following and following.tag - flow.tag or math.huge
    local wanted = math.min(count - #ids, math.max(least, math.floor(others / step) + 1))
    local popped = pop(tier, flow, wanted)
    for _, id in ipairs(popped) do ids[#ids + 1] = id end
    fair.v = math.max(fair.v, flow.tag + math.max(0, #popped - 1) * step)
    flow.tag, flow.moved = flow.tag + #popped * step, true
    moved(flow, popped)
    if #popped < wanted then gone[#gone + 1] = flow else place(entries, flow) end
    entries.first = entries.first + 1
  end
  save_tags(tier, entries, gone)
  return ids
end

-- A customer whose last id was popped stays in the index until the next visit, so a pass may find only such customers.
function serve(tier, count, highest, moved)
  while true do
    local entries = lowest_tags(tier, count)
    if #entries == 0 then return {} end
    if not highest then apart.used = false end
    local ids = visit(tier, entries, count, highest or select_customers(tier, entries, count), moved)
    if #ids > 0 then
      local fair = backlogs.tier(tier)
      fair.saved_quiet = fair.held and 2 or 0
      call('HSET', P .. 'fair:' .. tier, 'v', fair.v, 'quiet', fair.saved_quiet)
      call('PEXPIRE', P .. 'fair:' .. tier, backlogs.FAIR_MS)
      return ids
    end
  end
end

-- next_ids(tier, count) -> up to `count` ids, of at most MOST_AT_ONCE. The tier queue must be empty.
local function next_ids(tier, count)
  local MOST_AT_ONCE = 1000
  count = math.min(count, MOST_AT_ONCE)
  local costs = estimates[tier] or {}
  estimates[tier] = costs
  local ids = serve(tier, count, nil, function(flow, popped)
    for _, id in ipairs(popped) do charged[id] = flow end
    costs[flow.customer], has_estimates = {flow.cost, flow.weight}, true
  end)
  backlogs.remove(tier, #ids > 0 and #ids or math.max(1, backlogs.waiting[tier]))
  return ids
end

-- credit(tier, id): an id that was taken does not run.
local function credit(tier, id)
  local flow = charged[id]
  if not flow then return end
  local step = flow.cost / flow.weight
  flow.tag, charged[id] = flow.tag - step, nil
  if not call('ZADD', P .. 'backlogs:' .. tier, 'XX', 'INCR', -step, flow.customer) then
    call('HSET', flow.key, 'tag', flow.tag)
  end
end
