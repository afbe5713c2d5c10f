-- settlement: replaces the estimated cost of requests that were charged when they left a backlog by their measured share of the
-- batch's GPU time (needs prelude, row and backlogs). A batch has {estimate, weight, whether the estimate is its own} of each
-- customer in its field `costs`. Work that failed for another reason than its input costs nothing unless a part was delivered,
-- nor does cancelled work that was not measured.
local settlements = {}
local COST = 5 -- of a run
local CHARGED_FAILURES = {cancelled = true, poison_request = true, invalid_request = true, context_length_exceeded = true,
  request_too_large = true}
local SAMPLES = 16 -- so many new values replace a mean; fewer a part of it, and never more than half
local APART_SHARE, APART_MOST = 0.02, 16 -- of the GPU time, for the empty places of batches of quiet customers; in mean requests
local SAME = 0.01 -- a smaller relative change of a mean is not stored

-- settle_part(account, cost): a follower pays a part of a run. Its customer is charged if it has a backlog.
local parts = {}
local function settle_part(account, cost)
  local index = P .. 'backlogs:' .. account.tier
  if parts[index] == nil then parts[index] = call('EXISTS', index) == 1 and {} or false end
  local of_tier = parts[index]
  if not of_tier then return end
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

local function apply_settlement(sum)
  local key, cost = P .. 'flow:' .. sum.tier .. ':' .. sum.customer, sum[1]
  local change = (sum.measured + sum.other - (sum.count + sum.others) * cost) / sum[2]
  if change ~= 0 and not call('ZADD', P .. 'backlogs:' .. sum.tier, 'XX', 'INCR', change, sum.customer) then
    call('HINCRBYFLOAT', key, 'tag', change)
    call('PEXPIRE', key, backlogs.FLOW_MS)
  end
  local mean = sum.count > 0 and moving_mean(cost, sum.measured, sum.count) or cost
  if sum.count == 0 or sum[3] and math.abs(mean - cost) <= cost * SAME then return end
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
      local cost = moving_mean(backlogs.tier(tier).cost, mean.measured, mean.count)
      local most = APART_MOST * cost
      local apart = math.max(-most, math.min(most, backlogs.tier(tier).apart + mean.apart))
      redis.pcall('HSET', P .. 'fair:' .. tier, 'cost', cost, 'apart', apart)
      if not backlogs.tier(tier).is_stored then redis.pcall('PEXPIRE', P .. 'fair:' .. tier, backlogs.FAIR_MS) end
    end
  end
  for _, of_tier in pairs(parts) do
    for _, part in pairs(of_tier or {}) do pcall(apply_part, part) end
  end
  settlements, parts = {}, {}
end
