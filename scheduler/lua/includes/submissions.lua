-- submissions: unpacks the arguments of admit (needs them, prelude, backlogs, bucket, customer and shedding): one flat list of
-- submissions, and one entry per group for what the submissions of one key have in common.
-- submissions[o + FIELD] for o = 0, SIZE, 2 * SIZE...; its RARE is false or {idempotency, fingerprint, again, together, same,
-- keep_answer_ms, model_version}, as in Submission; group(n) -> the n-th {tier, customer, tier bucket, key bucket...}.
local ID, GROUP, BYTES, TOTAL_MS, QUEUE_MS, TOKENS, LENGTH, NONCE, TRACE, RARE, SIZE = 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 10
local tiers, groups, submissions = {}, cmsgpack.unpack(packed_groups), cmsgpack.unpack(packed_submissions)
local keys = {} -- of the row of each submission, in order
local arrived_at = sent_at > 0 and math.min(now, sent_at) or now
local paused = scheduler_is_paused(pass_ms)
bucket_kinds = cmsgpack.unpack(packed_kinds)
local max_ahead = #submissions / SIZE -- the most requests that can be queued after this call

local function read_tiers(limits, names)
  for i, t in ipairs(limits) do names[i] = t[1] end
  local waiting = backlogs.counts(names)
  for i, t in ipairs(limits) do
    local queued = call('LLEN', P .. 'queue:' .. t[1])
    tiers[t[1]] = {name = t[1], rate = t[2], burst = t[3], max_depth = t[4], ahead = t[5], shed_depth = paused and -1 or t[6],
      shed_wait_ms = t[7], share = t[8], shadow = t[9], places = t[10], open = t[11] > 0 and t[11] or t[10] / 4, ids = {}, waiting = waiting[i], backlogs = {},
      queued = queued}
    depth[t[1]] = queued + waiting[i]
    max_ahead = max_ahead + depth[t[1]]
  end
end

read_tiers(cmsgpack.unpack(packed_tiers), {})
for _, t in pairs(tiers) do set_shed_bounds(t, max_ahead, capacity) end

-- in_background[n]: whether the n-th group waits in the background queue of its tier. Its requests take nothing from the bucket of
-- the tier: `rl:tier:<tier>.background` has the same rate. The buckets of customer and key are the same.
-- homes[n]: Residence of its customer.
local in_background = packed_background ~= '' and cmsgpack.unpack(packed_background) or {}
local homes = packed_homes ~= '' and cmsgpack.unpack(packed_homes) or {}

local function group(n)
  local g = groups[n]
  if g.tier then return g end
  local t, customer_id, key_id, key_rate, key_burst, limits = tiers[g[1]], g[2], g[3], g[5], g[6], g[7]
  local rate, burst = t.rate, t.burst
  if in_background[n] then t = tiers[g[1] .. '.background'] end
  local tier_bucket = bucket(P .. 'rl:tier:' .. t.name, rate, burst)
  g = {tier = t, customer_id = customer_id, key_id = key_id, key_weight = limits[6] or 0, who = {}, number = packed[n],
    customer = customer(customer_id, limits), meter = limits[5] or metered.NO_METER, tier_bucket = tier_bucket,
    home = homes[n] or 0, key = key_rate > 0 and bucket(T .. 'rl:key:' .. key_id, key_rate, key_burst) or nil}
  g.quotas = quotas_of(g.customer, limits)
  groups[n] = g
  return g
end

for o = 1, #submissions, SIZE do keys[#keys + 1] = P .. 'request:' .. submissions[o] end
for n = 1, #groups do group(n) end
local may_be_known = has_repeats == 1 or call('EXISTS', unpack(keys)) > 0 -- rare: a call that is sent again
