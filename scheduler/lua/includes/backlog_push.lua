-- backlog_push: adds ids to the backlogs of customers (needs prelude and backlogs).
-- backlogs.append(tier, name, ids) -> whether there were other ids before.
function backlogs.append(tier, name, ids)
  if #ids == 0 then return true end
  local length = redis.pcall('LPUSH', name, unpack(ids))
  if type(length) ~= 'number' then
    backlogs.drop(tier, name)
    length = call('LPUSH', name, unpack(ids))
  end
  return length > #ids
end

-- backlogs.push(tier, ids_of) -> how many: adds ids to the backlogs of customers: {customer = {ids, oldest first, weight = weight,
-- keys = {key = {ids, weight = weight}} of keys with a weight}}. `backlogs.urgent`: a batch of quiet customers should leave now.
function backlogs.push(tier, ids_of)
  local count, check = 0, now_us % backlogs.CHECKS == 0 or backlogs.waiting[tier] == 0
  for customer, ids in pairs(ids_of) do
    local name = tier .. ':' .. customer
    local had_backlog = backlogs.append(tier, P .. 'backlog:' .. name, ids)
    count = count + #ids + (ids.keys and backlogs.push(name, ids.keys) or 0)
    if ids.keys then call('HSET', P .. 'flow:' .. name, 'keyed', 1) end -- before `list`, which sets the lifetime
    if check or not had_backlog or ids.keys or backlogs.flows[P .. 'flow:' .. name] then
      local flow, fair = backlogs.flow(tier, customer), backlogs.tier(tier)
      backlogs.list(tier, flow, ids.weight)
      if not had_backlog and flow.tag <= fair.v and (backlogs.waiting[tier] or 0) > 0 then
        if fair.quiet == 0 then call('HSET', P .. 'fair:' .. tier, 'quiet', 1) end
        fair.quiet, backlogs.urgent = math.max(1, fair.quiet), backlogs.urgent or fair.quiet == 0
      end
    end
  end
  if count > 0 then call('INCRBY', P .. 'waiting:' .. tier, count) end
  return count
end
