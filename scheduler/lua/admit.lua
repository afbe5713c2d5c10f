#!lua
-- admit: may these enter now? Each one is admitted whole or not at all; a rejection changes no key.
-- Idempotent by request id: an id that is stored already is told `duplicate` and nothing is done again.
-- KEYS[1] leases (routes the call). ARGV: 1 prefix, 2 gateway id, 3 capacity in requests/s (0 = not known),
--   4 packed tier limits {name, rate, burst, max_depth, ahead, shed_depth, shed_wait_ms}, 5 packed submissions
--   {id, tier, customer, key, nonce, model, input_bytes, total_ms, queue_ms, rate, burst, trace, idempotency,
--   fingerprint, again}, 6 ms that a request is kept after its deadline, 7 TIME in ms when the call was made, at the
--   latest (0 = not known): one that lay in the socket of a stopped Redis comes late, 8... the bodies, one a submission.
-- Returns packed verdicts {outcome, remaining, reset_ms, retry_after_ms, depth, stored id}, one a submission.
-- include: prelude, wake, ratelimit/bucket, epoch, idempotency, retry_budget, entering
local gateway, capacity, keep_ms, made = ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[6]), tonumber(ARGV[7])
local came = made > 0 and math.min(now, made) or now
local tiers, depth, verdicts = {}, {}, {}
if not epoch_us then begin_epoch() end
for _, t in ipairs(cmsgpack.unpack(ARGV[4])) do
  tiers[t[1]] = {rate = t[2], burst = t[3], max_depth = t[4], ahead = t[5], shed_depth = t[6], shed_wait_ms = t[7]}
  depth[t[1]] = redis.call('LLEN', P .. 'queue:' .. t[1])
end

local function judge(name, tier, key, share, queue_ms)
  if key.tokens < 1 then return 'key_limit', ms_until(key, 1) end
  if share.tokens < 1 then return 'tier_limit', ms_until(share, 1) end
  local ahead = 0
  for _, other in ipairs(tier.ahead) do ahead = ahead + (depth[other] or 0) end
  local wait_ms = capacity > 0 and ahead / capacity * 1000 or 0
  if tier.shed_depth >= 0 and ahead >= tier.shed_depth then return 'shed', wait_ms end
  if tier.shed_wait_ms >= 0 and wait_ms >= tier.shed_wait_ms then return 'shed', wait_ms end
  if depth[name] >= tier.max_depth or wait_ms >= queue_ms then return 'queue_full', wait_ms end
  return 'accepted', 0
end

-- decide(s, tier, key, share) -> outcome, ms until trying again pays, whose stored answer is to be replayed.
local function decide(s, tier, key, share)
  if redis.call('EXISTS', P .. 'request:' .. s[1]) == 1 then return 'duplicate', 0 end
  if came + s[8] <= now then return 'too_late', 0 end
  if s[15] then return 'accepted', 0 end -- it was judged and paid for when it came first
  local earlier, id = held(s[13], s[14])
  if earlier then return earlier, 0, id end
  local outcome, retry_ms = judge(s[2], tier, key, share, s[9])
  if outcome == 'accepted' then spend(key, 1) spend(share, 1) end
  return outcome, retry_ms
end

for i, s in ipairs(cmsgpack.unpack(ARGV[5])) do
  local tier = tiers[s[2]]
  local key, share = bucket(P .. 'rl:key:' .. s[4], s[10], s[11]), bucket(P .. 'rl:tier:' .. s[2], tier.rate, tier.burst)
  local outcome, retry_ms, stored_id = decide(s, tier, key, share)
  if outcome == 'accepted' then
    store(s, ARGV[7 + i], gateway, keep_ms, came)
    depth[s[2]] = depth[s[2]] + 1
  end
  verdicts[i] = {outcome, math.max(0, key.tokens), ms_until(key, key.burst), math.ceil(retry_ms), depth[s[2]], stored_id or ''}
end
if enter() then
  save_buckets()
  local waiting = 0
  for _, count in pairs(depth) do waiting = waiting + count end
  wake_at(waiting)
end
return cmsgpack.pack(verdicts)
