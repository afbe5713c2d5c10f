-- decisions: the outcome of each submission, and its verdict (needs submissions, backlogs, bucket, charge, coalescing, customer,
-- enqueue, shedding, and the arguments of admit).
-- own_flow(g) -> the flow of the customer. `length`: the number of its ids in the backlogs, those of this call included.
local function own_flow(g)
  if g.flow then return g.flow end
  local own = g.tier.backlogs[g.customer_id] or {}
  g.flow = backlogs.flow(g.tier.name, g.customer_id)
  if not g.flow.length then
    g.flow.length = backlogs.length(g.tier.name, g.flow) + #own
    for _, ids in pairs(own.keys or {}) do g.flow.length = g.flow.length + #ids end
  end
  return g.flow
end

-- is_within_share(g, count): whether a customer has no more than its part of the backlogs, by weight, or, without backlogs, few
-- open requests. Such a customer is not rejected because others have emptied the bucket of the tier: the bucket goes into debt, of
-- at most its size.
local function is_within_share(g, count)
  local t, c, b, OPEN = g.tier, g.customer, g.tier_bucket, 2 -- for every customer
  if b.tokens - count < -b.burst then return false end
  if t.waiting == 0 then
    return c.max_concurrency > 0 and c.in_use + count <= math.max(OPEN, c.weight * t.open)
  end
  local flow, weights = own_flow(g), backlogs.tier(t.name).weights
  if flow.length == 0 then weights = weights + c.weight end
  return flow.length + count <= math.max(1, t.waiting * c.weight / math.max(weights, c.weight))
end

-- check_limits(g, o, count, sums, coalesced) -> the limit that rejects `count` requests, and ms until it would not; nil if none
-- does. First the limits of key and customer, then the tier's rate. `sums` as in `cost`.
local function check_limits(g, o, count, sums, coalesced)
  local key, tier_bucket = g.key, g.tier_bucket
  if key and key.tokens < count then return 'key_limit', ms_until(key.tokens, count, key.rate) end
  local limit, retry_ms = check_customer(g, o, count, sums)
  if limit then return limit, retry_ms end
  local wanted = math.max(1, math.min(count, tier_bucket.burst)) -- more are accepted if it is full; the debt rejects later ones
  if not coalesced and tier_bucket.tokens < wanted and not is_within_share(g, count) then
    return 'tier_limit', ms_until(tier_bucket.tokens, wanted, tier_bucket.rate)
  end
end

-- own_depth(g) -> how many requests of the tier leave before the next one of this customer, at most: all of them or, with
-- backlogs, those in the tier queue and its own share of the others. So the customer with the largest backlog for its weight is
-- shed first, and none with less than its fair share.
local function own_depth(g)
  local t = g.tier
  if t.waiting == 0 then return depth[t.name] end
  return math.min(depth[t.name], t.queued + #t.ids + backlogs.own(t.name, own_flow(g), g.customer.weight))
end

-- is_full(g, count): whether the tier is full for this customer. One with less than its fair share may exceed the limit of the
-- tier, which others have reached; the tier never has more than twice as many.
local function is_full(g, count)
  local t = g.tier
  local total = depth[t.name] + count
  return total > t.max_depth and (t.waiting == 0 or total > 2 * t.max_depth or own_depth(g) + count > t.max_depth)
end

-- check(g, o, capacity, max_wait_ms, count, sums, coalesced) -> the same, shedding included. Shedding and the tier's rate do not
-- apply to a `coalesced` submission, which needs no GPU time.
local function check(g, o, capacity, max_wait_ms, count, sums, coalesced)
  local limit, retry_ms = check_limits(g, o, count, sums, coalesced)
  if not limit and coalesced then return end
  if not limit then return shed(g.tier, submissions[o + ID], capacity, max_wait_ms, own_depth, g) end
  save_changed_rates(g.customer, g.key, g.tier_bucket, o, count, sums)
  return limit, retry_ms
end

-- known_outcome(o, key) -> the outcome that no limit changes, and the id whose stored reply is replayed; nil for others.
local function known_outcome(o, key)
  if may_be_known and call('EXISTS', key) == 1 then return 'duplicate' end
  if arrived_at + submissions[o + TOTAL_MS] <= now then return 'too_late' end
  local rare = submissions[o + RARE]
  if rare and not rare[3] then return find_by_key(rare[1], rare[2]) end
end

-- evaluate(g, o, count, sums, coalesced) -> outcome, retry_ms, and the rejection of a tier in shadow.
local function evaluate(g, o, count, sums, coalesced)
  local t, max_wait_ms = g.tier, math.min(submissions[o + QUEUE_MS], submissions[o + TOTAL_MS] - run_ms)
  local limit, retry_ms = check(g, o, capacity, max_wait_ms, count, sums, coalesced)
  if limit and not t.shadow then return limit, retry_ms end
  if not coalesced and is_full(g, count) then return 'queue_full', 0 end
  return 'accepted', 0, limit
end

-- evaluate_together(g, keys, first, count) -> {outcome, retry_ms, shadowed} of submissions that are admitted together or not at
-- all, evaluated as one request with all their costs; nil if all of them are known already.
local function evaluate_together(g, keys, first, count)
  local fresh_count, sums = 0, {tokens = 0}
  for i = first, first + count - 1 do
    local o = (i - 1) * SIZE
    local known = known_outcome(o, keys[i])
    if not known then
      fresh_count = fresh_count + 1
      sums.tokens = sums.tokens + submissions[o + TOKENS]
      for n, b in ipairs(g.customer.buckets) do sums[n] = (sums[n] or 0) + cost(b, n, o, 1) end
    elseif known ~= 'replayed' and known ~= 'duplicate' then return {known, 0} end
  end
  return fresh_count > 0 and {evaluate(g, (first - 1) * SIZE, fresh_count, sums)} or nil
end

-- is_elsewhere(g): whether the limits of the customer left this cell or, where there are several cells, have not arrived in it with
-- those of the key. g.home: Residence in scheduler/protocol/admission.py.
local function is_elsewhere(g)
  if g.home == 3 then return false end
  local state, version, at = string.match(g.customer.home or '', '^(%a+) (%d+) (%d+)')
  if g.home == 0 or state ~= 'here' then return state == 'left' or g.home > 0 end
  g.has_moved = g.home == 1 and now - at < replay_ms -- then other cells may know its Idempotency-Keys
  return g.key and call('HGET', g.key.key, 'home') ~= version
end

-- decide(g, o, key, together) -> outcome, retry_ms, what was charged, the id whose stored reply is replayed or the names of the
-- quotas that reject, the rejection that a tier in shadow would have returned.
local function decide(g, o, key, together)
  local known, id = known_outcome(o, key)
  if known and (known == 'duplicate' or not together or together[1] == 'accepted') then
    if known == 'replayed' then call('HSET', P .. 'request:' .. id, 'replayed', 1) end -- it can no longer be revoked
    return known, 0, nil, id
  end
  local rare, outcome, retry_ms, limit = submissions[o + RARE], nil, nil, nil
  if rare and rare[3] then return 'accepted', 0, 'nothing' end -- it was evaluated and charged when it was first submitted
  if g.elsewhere == nil then g.elsewhere = is_elsewhere(g) or false end
  if g.elsewhere or g.has_moved and rare and rare[1] ~= '' then return 'elsewhere', 0 end
  local coalesced = rare and not together and needs_no_run(g, rare)
  if g.customer.asked then g.customer.asked = g.customer.asked + 1 end
  if together then outcome, retry_ms, limit = together[1], together[2], together[3]
  else outcome, retry_ms, limit = evaluate(g, o, 1, nil, coalesced) end
  if outcome ~= 'accepted' then return outcome, retry_ms, nil, outcome == 'quota' and g.refused_by or nil end
  if limit then return 'accepted', 0, 'nothing', nil, limit end
  if g.key then spend(g.key) end
  if not coalesced then spend(g.tier_bucket) end
  return 'accepted', 0, charge(g, o)
end

-- ACCEPTED, and pack_verdict(...): a packed verdict. The limits that remain are the same for a whole group, and packed once.
local ACCEPTED, NO_TEXT = '\192', '\160'
local function pack_verdict(outcome, retry_ms, stored_id, shadowed, reply)
  local fields = packed[outcome] .. packed[retry_ms] .. (stored_id and packed[stored_id] or NO_TEXT) ..
    (shadowed and packed[shadowed] or NO_TEXT)
  return reply and '\149' .. fields .. struct.pack('>BI2', 0xc5, #reply) .. reply or '\148' .. fields
end

-- pack_groups() -> packed {remaining limits, depth} of each group.
local function pack_groups()
  local found = {}
  for i, g in ipairs(groups) do found[i] = {remaining(g.customer, g.key, g.quotas), depth[g.tier.name]} end
  return cmsgpack.pack(found)
end
