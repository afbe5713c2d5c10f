-- room: limits that no submission of a call reaches (needs submissions, charge, decisions, and the arguments of admit).
-- find_room(): which groups have `room`: their limits and those of their tiers have room for all submissions of this call, so that
-- each of them is accepted, in any order. Then they need not be evaluated one by one. A limit that could change otherwise, or that
-- is not checked here, leaves no room, nor does a wait that is too long for any submission.
local function find_room()
  local counts, tokens, arriving, wait_ms = {}, {}, {}, math.huge -- arriving: numbers by tier, bucket, customer and key
  for n = 1, #groups do counts[n], tokens[n] = 0, 0 end
  for o = 0, #submissions - SIZE, SIZE do
    local n, rare = submissions[o + GROUP], submissions[o + RARE]
    local queue_ms, run_in_ms = submissions[o + QUEUE_MS], submissions[o + TOTAL_MS] - run_ms
    if rare and rare[5] then return end -- a cached reply may cost more than was reserved
    counts[n], tokens[n] = counts[n] + 1, tokens[n] + submissions[o + TOKENS]
    if queue_ms < wait_ms then wait_ms = queue_ms end
    if run_in_ms < wait_ms then wait_ms = run_in_ms end
  end
  for n, g in ipairs(groups) do
    for _, limited in ipairs({g.tier, g.tier_bucket, g.customer, g.key}) do
      arriving[limited] = (arriving[limited] or 0) + counts[n]
    end
    g.customer.arriving_tokens = (g.customer.arriving_tokens or 0) + tokens[n]
  end
  for _, g in ipairs(groups) do
    local t, c = g.tier, g.customer
    local count = arriving[c]
    g.room = t.never_sheds and t.max_wait_ms < wait_ms and depth[t.name] + arriving[t] <= t.max_depth and
      g.tier_bucket.tokens >= arriving[g.tier_bucket] and (not g.key or g.key.tokens >= arriving[g.key]) and
      not c.closed and not c.asked and not next(c.quotas) and (c.max_concurrency == 0 or c.in_use + count <= c.max_concurrency)
    for _, b in ipairs(c.buckets) do
      g.room = g.room and (b.cost == 0 and b.tokens >= count or b.cost == TOKENS and b.tokens >= c.arriving_tokens)
    end
    if g.room then
      g.elsewhere = is_elsewhere(g) or false
      g.room, g.taken, g.taken_tokens, g.charged = not g.elsewhere, 0, 0, charged_kind(g)
    end
  end
end

-- accept_in_room(g, o, key, body): accepts a submission of a group with room. What it costs is charged by charge_room().
local function accept_in_room(g, o, key, body)
  local name = g.tier.name
  g.taken, g.taken_tokens = g.taken + 1, g.taken_tokens + submissions[o + TOKENS]
  store(g, o, key, body, g.charged)
  add_lease(g.customer, submissions[o + ID], arrived_at + submissions[o + TOTAL_MS])
  depth[name] = depth[name] + 1
end

-- charge_room(): charges what was accepted in groups with room. No other submission of this call was rejected for these limits.
local function charge_room()
  for _, g in ipairs(groups) do
    local count, c = g.room and g.taken or 0, g.customer
    if count > 0 then
      spend(g.tier_bucket, count)
      if g.key then spend(g.key, count) end
      c.spent = true
      for _, b in ipairs(c.buckets) do b.tokens = b.tokens - (b.cost == 0 and count or g.taken_tokens) end
    end
  end
end
