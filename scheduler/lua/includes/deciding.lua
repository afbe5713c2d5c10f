-- deciding: what becomes of one submission (needs asking, idempotency, collapsing and judging). Those that enter together are
-- judged once, as one request of all their tokens and places; then each is told the same, unless it was known before.
-- earlier(o, key) -> the outcome of what needs no judgement, and whose stored answer is to be replayed; nil for the others.
local function earlier(o, key)
  if look and call('EXISTS', key) == 1 then return 'duplicate' end
  if came + asked[o + TOTAL_MS] <= now then return 'too_late' end
  local rare = asked[o + RARE]
  if rare and not rare[3] then return held(rare[1], rare[2]) end
end

-- judged(g, o, tokens, count, shared) -> outcome, ms until trying again pays, and the refusal of a tier in shadow.
local function judged(g, o, tokens, count, shared)
  local t, longest_ms = g.tier, math.min(asked[o + QUEUE_MS], asked[o + TOTAL_MS] - run_ms)
  local limit, retry_ms = judge(asked[o + ID], g, tokens, capacity, longest_ms, count, shared)
  if limit and not t.shadow then return limit, retry_ms end
  if not shared and depth[t.name] + count > t.max_depth then return 'queue_full', 0 end
  return 'accepted', 0, limit
end

-- party(g, keys, first, count) -> {outcome, retry_ms, shadowed} for all that are not known yet; nil where nobody is left.
local function party_of(g, keys, first, count)
  local fresh, tokens = 0, 0
  for i = first, first + count - 1 do
    local o = (i - 1) * SIZE
    local known = earlier(o, keys[i])
    if not known then fresh, tokens = fresh + 1, tokens + asked[o + TOKENS]
    elseif known ~= 'replayed' and known ~= 'duplicate' then return {known, 0} end
  end
  return fresh > 0 and {judged(g, (first - 1) * SIZE, tokens, fresh)} or nil
end

-- decide(g, o, key, party) -> outcome, ms until trying again pays, what was paid, whose stored answer is to be replayed, which
-- refusal a tier in shadow would have given.
local function decide(g, o, key, party)
  local known, id = earlier(o, key)
  if known and (known == 'duplicate' or not party or party[1] == 'accepted') then return known, 0, nil, id end
  local tokens, rare, outcome, retry_ms, limit = asked[o + TOKENS], asked[o + RARE], nil, nil, nil
  if rare and rare[3] then return 'accepted', 0, 'nothing' end -- it was judged and paid for when it came first
  local shared = rare and not party and shares(g, rare)
  if party then outcome, retry_ms, limit = party[1], party[2], party[3]
  else outcome, retry_ms, limit = judged(g, o, tokens, 1, shared) end
  if outcome ~= 'accepted' then return outcome, retry_ms end
  if limit then return 'accepted', 0, 'nothing', nil, limit end
  if g.key then spend(g.key) end
  if not shared then spend(g.pool) end
  return 'accepted', 0, charge(g.customer, tokens)
end
