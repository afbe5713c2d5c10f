-- deciding: the outcome of each submission, and its verdict (needs asking, charge, coalescing, customer, entering and shedding).
-- judging: which limit rejects first (needs bucket, customer, charge and shedding).
-- limited(g, o, count, sums, shared) -> the limit that rejects `count` requests, and ms until it would not; nil where none does:
-- the client's own limits first, then its tier's part of the capacity. `sums` as in `cost`.
local function limited(g, o, count, sums, shared)
  local key, pool = g.key, g.pool
  if key and key.tokens < count then return 'key_limit', ms_until(key.tokens, count, key.rate) end
  local limit, retry_ms = refuse(g.customer, o, count, sums)
  if limit then return limit, retry_ms end
  local wanted = math.max(1, math.min(count, pool.burst)) -- more enter when it is full: their debt keeps the next ones out
  if not shared and pool.tokens < wanted then return 'tier_limit', ms_until(pool.tokens, wanted, pool.rate) end
end

-- judge(g, o, capacity, longest_ms, count, sums, shared) -> the same after what waits in the queue; it and the tier's part do not
-- apply to one that is `shared`, for which no GPU works.
local function judge(g, o, capacity, longest_ms, count, sums, shared)
  local limit, retry_ms = limited(g, o, count, sums, shared)
  if not limit and shared then return end
  if not limit then return shed(g.tier, asked[o + ID], capacity, longest_ms) end
  note_rates(g.customer, g.key, g.pool, o, count, sums)
  return limit, retry_ms
end

-- deciding: what becomes of one submission (needs asking, idempotency, collapsing and judging). Those that enter together are
-- judged once, as one request of all their tokens and places; then each is told the same, unless it was known before.
-- earlier(o, key) -> the outcome of what needs no judgement, and whose stored answer is to be replayed; nil for the others.
local function earlier(o, key)
  if look and call('EXISTS', key) == 1 then return 'duplicate' end
  if came + asked[o + TOTAL_MS] <= now then return 'too_late' end
  local rare = asked[o + RARE]
  if rare and not rare[3] then return held(rare[1], rare[2]) end
end

-- judged(g, o, count, sums, shared) -> outcome, ms until trying again pays, and the refusal of a tier in shadow.
local function judged(g, o, count, sums, shared)
  local t, longest_ms = g.tier, math.min(asked[o + QUEUE_MS], asked[o + TOTAL_MS] - run_ms)
  local limit, retry_ms = judge(g, o, capacity, longest_ms, count, sums, shared)
  if limit and not t.shadow then return limit, retry_ms end
  if not shared and depth[t.name] + count > t.max_depth then return 'queue_full', 0 end
  return 'accepted', 0, limit
end

-- party(g, keys, first, count) -> {outcome, retry_ms, shadowed} for all that are not known yet; nil where nobody is left.
local function party_of(g, keys, first, count)
  local fresh, sums = 0, {}
  for i = first, first + count - 1 do
    local o = (i - 1) * SIZE
    local known = earlier(o, keys[i])
    if not known then
      fresh = fresh + 1
      for n, b in ipairs(g.customer.buckets) do sums[n] = (sums[n] or 0) + cost(b, n, o, 1) end
    elseif known ~= 'replayed' and known ~= 'duplicate' then return {known, 0} end
  end
  return fresh > 0 and {judged(g, (first - 1) * SIZE, fresh, sums)} or nil
end

-- decide(g, o, key, party) -> outcome, ms until trying again pays, what was paid, whose stored answer is to be replayed, which
-- refusal a tier in shadow would have given.
local function decide(g, o, key, party)
  local known, id = earlier(o, key)
  if known and (known == 'duplicate' or not party or party[1] == 'accepted') then return known, 0, nil, id end
  local rare, outcome, retry_ms, limit = asked[o + RARE], nil, nil, nil
  if rare and rare[3] then return 'accepted', 0, 'nothing' end -- it was judged and paid for when it came first
  local shared = rare and not party and shares(g, rare)
  if party then outcome, retry_ms, limit = party[1], party[2], party[3]
  else outcome, retry_ms, limit = judged(g, o, 1, nil, shared) end
  if outcome ~= 'accepted' then return outcome, retry_ms end
  if limit then return 'accepted', 0, 'nothing', nil, limit end
  if g.key then spend(g.key) end
  if not shared then spend(g.pool) end
  return 'accepted', 0, charge(g.customer, o)
end

-- verdicts: the result of each submission, as `Verdict` is decoded (needs prelude, customer and asking). Numbers have fixed
-- lengths, so that one call packs them all.
local UINT32, MOST, NO_TEXT = 206, 4294967295, '\160'
local FORM = '>Bc0c0BI4BI4c0c0'

-- verdict(...) -> it, packed. Only a wait for the end of a long quota is too long for four bytes.
local function verdict(outcome, g, retry_ms, stored_id, shadowed)
  local left, waiting = remaining(g.customer, g.key), depth[g.tier.name]
  local stored, shadow = stored_id and packed[stored_id] or NO_TEXT, shadowed and packed[shadowed] or NO_TEXT
  if retry_ms > MOST then
    return '\150' .. packed[outcome] .. left .. cmsgpack.pack(retry_ms) .. cmsgpack.pack(waiting) .. stored .. shadow
  end
  return struct.pack(FORM, 150, packed[outcome], left, UINT32, retry_ms, UINT32, waiting, stored, shadow)
end
