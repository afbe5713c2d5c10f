-- settlement: replaces the estimated cost of requests that were charged when they left a backlog by their measured share of the
-- batch's GPU time (needs prelude, row and backlogs). A batch has the estimate of each customer in its field `costs`. Work that
-- was cancelled or that failed for another reason than its input costs nothing.
local settlements, CHARGED_FAILURES, COST = {}, {poison_request = true, invalid_request = true}, 5
local SAMPLES = 16 -- requests after which half of a mean cost or more is new

-- settle(batch, account, state, code, run): a request of the batch has ended. `run[COST]`: its GPU time in ms, if measured.
local function settle(batch, account, state, code, run)
  if not batch.costs then return end
  if type(batch.costs) == 'string' then batch.costs = cmsgpack.unpack(batch.costs) end
  local name = account.tier .. ' ' .. account.customer
  local estimate = batch.costs[name]
  if not estimate then return end
  local measured = (state == 'completed' or CHARGED_FAILURES[code]) and run[COST] or nil
  local sum = settlements[name] or {tier = account.tier, customer = account.customer, change = 0, cost = 0, count = 0}
  settlements[name], sum.change = sum, sum.change + (measured or 0) - estimate
  if measured and measured >= 0 and state == 'completed' then sum.cost, sum.count = sum.cost + measured, sum.count + 1 end
end

-- moving_mean(mean, sum, count): with `count` new values.
local function moving_mean(mean, sum, count)
  return mean + (sum / count - mean) * math.min(0.5, count / SAMPLES)
end

local function apply_settlement(sum)
  local flow, fair, index = backlogs.flow(sum.tier, sum.customer), backlogs.tier(sum.tier), P .. 'backlogs:' .. sum.tier
  if sum.count > 0 then
    flow.cost = math.max(0.001, moving_mean(flow.cost, sum.cost, sum.count))
    fair.cost = math.max(0.001, moving_mean(fair.cost, sum.cost, sum.count))
    call('HSET', P .. 'fair:' .. sum.tier, 'cost', fair.cost)
    call('PEXPIRE', P .. 'fair:' .. sum.tier, backlogs.FAIR_MS)
  end
  local change = sum.change / flow.weight
  local listed = change ~= 0 and call('ZADD', index, 'XX', 'INCR', change, sum.customer)
  if listed or change == 0 then call('HSET', flow.key, 'cost', flow.cost)
  else call('HSET', flow.key, 'cost', flow.cost, 'tag', flow.tag + change) end
  call('PEXPIRE', flow.key, backlogs.FLOW_MS)
end

-- apply_settlements(): errors are ignored, because the requests have ended, and a settlement must not block replies.
local function apply_settlements()
  for _, sum in pairs(settlements) do pcall(apply_settlement, sum) end
  settlements = {}
end
