#!lua
-- admit: may these enter now? Each one is admitted whole or not at all; a rejection spends nothing. All that it ever
-- writes is that a rate has changed, once, on a bucket that it found empty.
-- Idempotent by request id: an id that is stored already is told `duplicate` and nothing is done again.
-- KEYS[1] leases (routes the call). ARGV: 1 prefix, 2 gateway id, 3 capacity in requests/s (0 = not known),
--   4 packed tier limits {name, rate, burst, max_depth, ahead, shed_depth, shed_wait_ms, share, shadow}, 5 packed
--   customers {id: {rate, burst, tokens a minute, concurrency, quotas}}, 6 packed submissions {id, tier, customer, key,
--   nonce, model, input_bytes, total_ms, queue_ms, trace, idempotency, fingerprint, again, tokens, key rate, key burst},
--   7 ms that a request is kept after its deadline, 8 TIME in ms when the call was made, at the latest (0 = not known):
--   one that lay in the socket of a stopped Redis comes late, 9 ms that a run takes, 10... the bodies, one a submission.
-- Returns packed verdicts {outcome, remaining, reset_ms, retry_after_ms, depth, stored id, tokens left, tokens reset_ms,
--   in use, {{quota left, quota reset_ms}...}, shadowed}, one a submission.
-- include: prelude, wake, ratelimit/bucket, ratelimit/quota, ratelimit/customer, ratelimit/customer_save, ratelimit/shedding, epoch, idempotency, retry_budget, entering, judging
local gateway, capacity, keep_ms, made, run_ms = ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[7]), tonumber(ARGV[8]), tonumber(ARGV[9])
local came = made > 0 and math.min(now, made) or now
local tiers, told, verdicts = {}, cmsgpack.unpack(ARGV[5]), {}
if not epoch_us then begin_epoch() end
for _, t in ipairs(cmsgpack.unpack(ARGV[4])) do
  tiers[t[1]] = {name = t[1], rate = t[2], burst = t[3], max_depth = t[4], ahead = t[5], shed_depth = t[6],
    shed_wait_ms = t[7], share = t[8], shadow = t[9]}
  depth[t[1]] = redis.call('LLEN', P .. 'queue:' .. t[1])
end

-- decide(s, t, c, key, pool) -> outcome, ms until trying again pays, whose stored answer is to be replayed, what was
-- paid, which refusal a tier in shadow would have given.
local function decide(s, t, c, key, pool)
  if redis.call('EXISTS', P .. 'request:' .. s[1]) == 1 then return 'duplicate', 0 end
  if came + s[8] <= now then return 'too_late', 0 end
  if s[13] then return 'accepted', 0 end -- it was judged and paid for when it came first
  local earlier, id = held(s[11], s[12])
  if earlier then return earlier, 0, id end
  local limit, retry_ms = judge(s, t, c, key, pool, capacity, run_ms)
  if limit and not t.shadow then return limit, retry_ms end
  if depth[s[2]] >= t.max_depth then return 'queue_full', 0 end
  if limit then return 'accepted', 0, nil, '', limit end
  if key then spend(key) end
  spend(pool)
  return 'accepted', 0, nil, (key and s[4] or '-') .. ' ' .. charge(c, s[14])
end

for i, s in ipairs(cmsgpack.unpack(ARGV[6])) do
  local t, c = tiers[s[2]], customer(s[3], told[s[3]])
  local key = s[15] > 0 and bucket(P .. 'rl:key:' .. s[4], s[15], s[16]) or nil
  local outcome, retry_ms, stored_id, paid, shadowed = decide(s, t, c, key, bucket(P .. 'rl:tier:' .. s[2], t.rate, t.burst))
  if outcome == 'accepted' then
    store(s, ARGV[9 + i], gateway, keep_ms, came, paid or '')
    hold_lease(c, s[1], came + s[8])
    depth[s[2]] = depth[s[2]] + 1
  end
  verdicts[i] = verdict(outcome, c, key, math.ceil(retry_ms), depth[s[2]], stored_id, shadowed)
end
if enter() then
  save_buckets()
  save_customers()
  local waiting = 0
  for _, count in pairs(depth) do waiting = waiting + count end
  wake_at(waiting)
end
return cmsgpack.pack(verdicts)
