-- asking: a call's submissions as the gateway packs them (needs prelude, bucket, customer and shedding): one flat list, and
-- what submissions of one key have in common once for all of them.
-- asked[o + FIELD] for o = 0, SIZE, 2 * SIZE...; its RARE is false or {idempotency, fingerprint, again, same, ttl_ms,
-- version}, as in Submission; group(n) -> the n-th {tier, customer, pool, key...}.
local ID, GROUP, BYTES, TOTAL_MS, QUEUE_MS, TOKENS, LENGTH, NONCE, TRACE, RARE, SIZE = 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 10
local gateway, capacity, tiers, groups, asked = ARGV[2], tonumber(ARGV[3]), {}, cmsgpack.unpack(ARGV[5]), cmsgpack.unpack(ARGV[6])
local keys, made, run_ms = {}, tonumber(ARGV[8]), tonumber(ARGV[9]) -- the key of each submission's row, in order
local came = made > 0 and math.min(now, made) or now
local paused = no_scheduler_passes(tonumber(ARGV[15]))
kinds = cmsgpack.unpack(ARGV[16])
local most = #asked / SIZE -- that may be ahead of anybody when this call is done

for _, t in ipairs(cmsgpack.unpack(ARGV[4])) do
  tiers[t[1]] = {name = t[1], rate = t[2], burst = t[3], max_depth = t[4], ahead = t[5], shed_depth = paused and -1 or t[6],
    shed_wait_ms = t[7], share = t[8], shadow = t[9], ids = {}}
  depth[t[1]] = call('LLEN', P .. 'queue:' .. t[1])
  most = most + depth[t[1]]
end
for _, t in pairs(tiers) do foresee(t, most, capacity) end

local function group(n)
  local g = groups[n]
  if g.tier then return g end
  local t, customer_id, key_id, key_rate, key_burst, limits = tiers[g[1]], g[2], g[3], g[5], g[6], g[7]
  g = {tier = t, customer_id = customer_id, key_id = key_id, who = {}, customer = customer(customer_id, limits),
    pool = bucket(P .. 'rl:tier:' .. t.name, t.rate, t.burst),
    key = key_rate > 0 and bucket('rl:key:' .. key_id, key_rate, key_burst) or nil}
  groups[n] = g
  return g
end

for o = 1, #asked, SIZE do keys[#keys + 1] = P .. 'request:' .. asked[o] end
local look = ARGV[11] == '1' or call('EXISTS', unpack(keys)) > 0 -- hardly ever: a call that is sent again
