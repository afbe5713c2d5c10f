-- settlement: replaces the estimated cost of requests that were charged when they left a backlog by their measured share of the
-- batch's GPU time (needs prelude, row and backlogs). A batch has {estimate, weight} of each customer
-- in its field `costs`. Work that failed for another reason than its input costs nothing unless a part was delivered,
-- nor does cancelled work that was not measured. Means change only while requests of the tier wait in backlogs: GPUs that are not full
-- are shared by fewer requests, each of which seems to cost many times more than it will when it matters.
local settlements = {}
local COST = 5 -- of a run
local CHARGED_FAILURES = {cancelled = true, poison_request = true, invalid_request = true, context_length_exceeded = true,
  request_too_large = true}
local SAMPLES = 16 -- so many new values replace a mean; fewer a part of it, and never more than half
local APART_SHARE, APART_MOST = 0.02, 16 -- of the GPU time, for the empty places of batches of quiet customers; in mean requests
local SAME = 0.01 -- a smaller relative change of a mean is not stored
local REFUND = 64 -- requests of mean cost: so far below v, where a customer that arrives begins, corrections may put a tag

-- has_backlogs(tier): whether requests of the tier wait in backlogs. Read once per call.
local backlogged = {}
local function has_backlogs(tier)
  if backlogged[tier] == nil then backlogged[tier] = call('EXISTS', P .. 'backlogs:' .. tier) == 1 end
  return backlogged[tier]
end

-- settle_part(account, cost): a follower pays a part of a run. Its customer is charged if it has a backlog.
local parts = {}
local function settle_part(account, cost)
  if not has_backlogs(account.tier) then return end
  local of_tier = parts[account.tier] or {}
  parts[account.tier] = of_tier
  local part = of_tier[account.customer] or {tier = account.tier, customer = account.customer, cost = 0}
  of_tier[account.customer], part.cost = part, part.cost + cost
end

-- settle(batch, account, state, cost): a request of the batch has ended. `cost`: the GPU time in ms that it pays, or nil. Costs of
-- completed requests are `measured`; others are not in the mean. `apart`: the part of a cost that changes the tier's `apart`.
local function settle(batch, account, state, cost)
  if batch.served_from and cost then return settle_part(account, cost) end
  if not batch.costs then return end
  batch.sums = batch.sums or cmsgpack.unpack(batch.costs) -- `costs` stays as it is, for a retry
  local of_tier = batch.sums[account.tier]
  local sum = of_tier and of_tier[account.customer]
  if not sum then return end
  if not sum.count then
    settlements[#settlements + 1] = sum
    sum.tier, sum.customer, sum.apart = account.tier, account.customer, APART_SHARE - (batch.empty or 0)
    sum.measured, sum.count, sum.other, sum.others = 0, 0, 0, 0
  end
  if cost and state == 'completed' then sum.measured, sum.count = sum.measured + cost, sum.count + 1
  else sum.other, sum.others = sum.other + (cost or 0), sum.others + 1 end
end

-- moving_mean(mean, sum, count): with `count` new values.
local function moving_mean(mean, sum, count)
  return math.max(0.001, mean + (sum / count - mean) * math.min(0.5, count / SAMPLES))
end

-- correct_tag(sum, key): by the difference of estimate and cost. Estimates that were far too high, of many requests at once, have put v
-- far ahead; a customer that arrived then would wait until the other has used up the difference.
local function correct_tag(sum, key)
  local index, change = P .. 'backlogs:' .. sum.tier, (sum.measured + sum.other - (sum.count + sum.others) * sum[1]) / sum[2]
  if change == 0 then return end
  local tag = call('ZADD', index, 'XX', 'INCR', change, sum.customer)
  if not tag then
    call('HINCRBYFLOAT', key, 'tag', change)
    return call('PEXPIRE', key, backlogs.FLOW_MS)
  end
  local fair = backlogs.tier(sum.tier)
  local least = fair.v - REFUND * fair.cost / sum[2]
  if change < 0 and tonumber(tag) < least then call('ZADD', index, 'XX', least, sum.customer) end
end

local function apply_settlement(sum)
  local key = P .. 'flow:' .. sum.tier .. ':' .. sum.customer
  correct_tag(sum, key)
  if sum.count == 0 or not has_backlogs(sum.tier) then return end
  local flow = backlogs.flow(sum.tier, sum.customer) -- its mean of now: in slots, many requests run that were charged before
  local mean = moving_mean(flow.cost, sum.measured, sum.count)
  if flow.is_known and math.abs(mean - flow.cost) <= flow.cost * SAME then return end
  flow.cost, flow.is_known = mean, true
  call('HSET', key, 'cost', mean)
  call('PEXPIRE', key, backlogs.FLOW_MS)
end

local function apply_part(part)
  call('ZADD', P .. 'backlogs:' .. part.tier, 'XX', 'INCR', part.cost / backlogs.flow(part.tier, part.customer).weight, part.customer)
end

-- apply_settlements(): errors are ignored, because the requests have ended, and a settlement must not block replies.
local function apply_settlements()
  local means = {}
  for _, sum in ipairs(settlements) do
    pcall(apply_settlement, sum)
    local mean = means[sum.tier] or {measured = 0, count = 0, apart = 0}
    means[sum.tier], mean.measured, mean.count = mean, mean.measured + sum.measured, mean.count + sum.count
    mean.apart = mean.apart + (sum.measured + sum.other) * sum.apart
  end
  for tier, mean in pairs(means) do
    if mean.count > 0 then
      local cost = backlogs.tier(tier).cost
      if has_backlogs(tier) then cost = moving_mean(cost, mean.measured, mean.count) end
      local most = APART_MOST * cost
      local apart = math.max(-most, math.min(most, backlogs.tier(tier).apart + mean.apart))
      redis.pcall('HSET', P .. 'fair:' .. tier, 'cost', cost, 'apart', apart)
      if not backlogs.tier(tier).is_stored then redis.pcall('PEXPIRE', P .. 'fair:' .. tier, backlogs.FAIR_MS) end
    end
  end
  for _, of_tier in pairs(parts) do
    for _, part in pairs(of_tier) do pcall(apply_part, part) end
  end
  settlements, parts, backlogged = {}, {}, {}
end
