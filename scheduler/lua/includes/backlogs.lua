-- backlogs: fair queueing of the customers of a tier by GPU time (needs prelude). `queue:<tier>` has the ids that leave next.
-- While it is full, each customer's requests wait in `backlog:<tier>:<customer>`, and form_batch moves them up by start-time
-- fair queueing (Goyal, Vin, Cheng, SIGCOMM 1996). The tag of a customer is the GPU time in ms, divided by its weight, that it
-- has received in terms of the virtual time `v` of its tier; the lowest tag is next. A customer that was idle starts at `v`:
-- before all others, and without credit for the time when it was idle.
-- `backlogs:<tier>`: customers by tag. `fair:<tier>`: v, the sum of the weights in `backlogs`, the mean cost of a request.
-- `flow:<tier>:<customer>`: tag, weight, mean cost of its requests. `waiting:<tier>`: the number of ids in all backlogs.
-- Keys with a weight of their own divide their customer's part: they have the same keys in Redis, in which `<tier>:<customer>`
-- takes the place of the tier and the key that of the customer; their cost is the number of requests. The customer's other ids
-- are in its own list, and together count as one key, `-`, with a weight of 1.
-- LEAD, in requests of mean cost: the largest distance of a tag from `v` when a customer returns. CHECKS: one call in so many
-- checks the index, and the weight of customers with a backlog.
local backlogs = {FLOW_MS = 600000, FAIR_MS = 1200000, LEAD = 256, CHECKS = 16, waiting = {}, tiers = {}, flows = {}}

-- backlogs.counts(tiers) -> the number of ids in the backlogs of each tier. A Redis user with older ACL rules has no access to
-- them; then all ids are in the tier queues, in order of arrival.
function backlogs.counts(tiers)
  local keys, counts = {}, {}
  for i, tier in ipairs(tiers) do keys[i] = P .. 'waiting:' .. tier end
  local stored = #keys > 0 and redis.pcall('MGET', unpack(keys)) or {}
  backlogs.denied = stored.err ~= nil
  for i, tier in ipairs(tiers) do
    counts[i] = math.max(0, tonumber(stored[i] or 0) or 0)
    backlogs.waiting[tier] = counts[i]
  end
  return counts
end

-- backlogs.read(key, ...) -> fields of a hash; a key of a wrong type is deleted.
function backlogs.read(key, ...)
  local row = redis.pcall('HMGET', key, ...)
  if not row.err then return row end
  call('DEL', key)
  return {}
end

-- backlogs.drop(tier, list): deletes a backlog of a wrong type. `repair` finds the rows of its requests.
function backlogs.drop(tier, list)
  call('DEL', list)
  call('SADD', P .. 'repairs', 'backlogs:' .. string.match(tier, '^[^:]+'))
  call('PEXPIRE', P .. 'repairs', backlogs.FLOW_MS)
end

-- backlogs.tier(tier) -> {v, weights, cost, apart, quiet, is_stored}; backlogs.flow(tier, customer) -> {tag, weight, cost, keyed}: both are read once
-- per call. `keyed`: keys of the customer have a weight. `quiet`: 1 if a customer without a backlog, and with less than its share,
-- sent a request since the last batch, 2 if it waited for that one. `apart`: the GPU time in ms that the empty places of batches of such customers may still take.
function backlogs.tier(tier)
  if not backlogs.tiers[tier] then
    local row = backlogs.read(P .. 'fair:' .. tier, 'v', 'weights', 'cost', 'apart', 'quiet')
    backlogs.tiers[tier] = {v = tonumber(row[1] or 0), weights = tonumber(row[2] or 0), cost = tonumber(row[3] or 1),
      apart = tonumber(row[4] or 1), quiet = tonumber(row[5] or 0), is_stored = row[1]}
  end
  return backlogs.tiers[tier]
end

function backlogs.flow(tier, customer)
  local key = P .. 'flow:' .. tier .. ':' .. customer
  if not backlogs.flows[key] then
    local row = backlogs.read(key, 'tag', 'weight', 'cost', 'keyed')
    backlogs.flows[key] = {key = key, customer = customer, list = P .. 'backlog:' .. tier .. ':' .. customer,
      tag = tonumber(row[1] or 0), weight = tonumber(row[2] or 1), cost = tonumber(row[3]) or backlogs.tier(tier).cost,
      is_known = tonumber(row[3]) ~= nil, keyed = row[4] == '1'}
  end
  return backlogs.flows[key]
end

-- backlogs.add_weight(tier, change): of customers that enter or leave `backlogs`.
function backlogs.add_weight(tier, change)
  backlogs.tier(tier).weights = tonumber(call('HINCRBYFLOAT', P .. 'fair:' .. tier, 'weights', change))
end

-- backlogs.leave(tier, gone): the backlogs of these flows are empty.
function backlogs.leave(tier, gone)
  if #gone == 0 then return end
  local customers, weight = {}, 0
  for i, flow in ipairs(gone) do
    customers[i], weight = flow.customer, weight + flow.weight
    call('HSET', flow.key, 'tag', flow.tag)
    call('PEXPIRE', flow.key, backlogs.FLOW_MS)
  end
  call('ZREM', P .. 'backlogs:' .. tier, unpack(customers))
  if call('EXISTS', P .. 'backlogs:' .. tier) == 1 then return backlogs.add_weight(tier, -weight) end
  call('HDEL', P .. 'fair:' .. tier, 'weights')
  backlogs.tier(tier).weights = 0
end

-- backlogs.length(tier, flow) -> the number of a customer's ids.
function backlogs.length(tier, flow)
  local of_keys = flow.keyed and call('GET', P .. 'waiting:' .. tier .. ':' .. flow.customer)
  local own = redis.pcall('LLEN', flow.list) -- a list of a wrong type is empty
  return (tonumber(own) or 0) + (tonumber(of_keys or 0) or 0)
end

-- backlogs.correct(tier): the count is positive while there are ids.
function backlogs.correct(tier)
  call('SET', P .. 'waiting:' .. tier, 1)
  backlogs.waiting[tier] = 1
end

-- backlogs.remove(tier, count): so many ids left the backlogs. A wrong count is corrected: it is positive while there are any.
function backlogs.remove(tier, count)
  if count == 0 then return end
  local left = call('DECRBY', P .. 'waiting:' .. tier, count)
  backlogs.waiting[tier] = math.max(0, left)
  if left > 0 then return end
  call('DEL', P .. 'waiting:' .. tier)
  local stored, gone = call('ZRANGE', P .. 'backlogs:' .. tier, 0, 15, 'WITHSCORES'), {}
  for i = 1, #stored, 2 do
    local flow = backlogs.flow(tier, stored[i])
    local length = flow.customer ~= '-' and backlogs.length(tier, flow) or 0 -- ids of `-` are not counted here
    if length > 0 then return backlogs.correct(tier) end
    if flow.customer ~= '-' then flow.tag, gone[#gone + 1] = tonumber(stored[i + 1]), flow end
  end
  backlogs.leave(tier, gone)
  -- Others may follow: form_batch removes those without ids, and then the number.
  if #gone == 16 and call('EXISTS', P .. 'backlogs:' .. tier) == 1 then backlogs.correct(tier) end
end

-- backlogs.list(tier, flow, weight): adds a customer to the index, or stores its changed weight. 0: the weight is not known.
function backlogs.list(tier, flow, weight)
  local fair = backlogs.tier(tier)
  if weight == 0 then weight = flow.weight end
  flow.tag = math.max(fair.v, math.min(flow.tag, fair.v + backlogs.LEAD * fair.cost / weight))
  local is_new = call('ZADD', P .. 'backlogs:' .. tier, 'NX', flow.tag, flow.customer) == 1
  if not is_new and flow.weight == weight then return call('PEXPIRE', flow.key, backlogs.FLOW_MS) end
  backlogs.add_weight(tier, is_new and weight or weight - flow.weight)
  flow.weight = weight
  call('HSET', flow.key, 'weight', weight)
  call('PEXPIRE', flow.key, backlogs.FLOW_MS)
  call('PEXPIRE', P .. 'fair:' .. tier, backlogs.FAIR_MS)
end

-- backlogs.own(tier, flow) -> how many requests of the tier leave before the next one of this customer, at most: its own ones,
-- in units of the mean cost, in proportion to the weights of all customers with a backlog.
function backlogs.own(tier, flow, weight)
  local fair = backlogs.tier(tier)
  return flow.length == 0 and 0 or flow.length * flow.cost / fair.cost * math.max(fair.weights, weight) / weight
end

-- backlogs.heads(tier) -> the oldest ids of the customers with the lowest and the highest tag. Those between are not read: of the
-- two, the second is usually the customer with the longest wait.
function backlogs.heads(tier)
  local index, ids = P .. 'backlogs:' .. tier, {}
  local customers = call('ZRANGE', index, 0, 1)
  if customers[2] then customers[2] = call('ZRANGE', index, -1, -1)[1] end
  for _, customer in ipairs(customers) do
    ids[#ids + 1] = call('LINDEX', P .. 'backlog:' .. tier .. ':' .. customer, -1) or nil
  end
  return ids
end
