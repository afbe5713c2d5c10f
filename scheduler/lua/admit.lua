#!lua
-- admit: may these enter now? Each one is admitted whole or not at all; a rejection spends nothing. All that it ever
-- writes is that a rate has changed, once, on a bucket that it found empty.
-- Idempotent by request id: an id that is stored already is told `duplicate` and nothing is done again.
-- KEYS[1] leases (routes the call). ARGV: 1 prefix, 2 gateway id, 3 capacity in requests/s (0 = not known),
--   4 packed tier limits {name, rate, burst, max_depth, ahead, shed_depth, shed_wait_ms, share, shadow}, 5 packed groups
--   {tier, customer, key, model, key rate, key burst, {rate, burst, tokens a minute, concurrency, quotas}}, 6 packed
--   submissions, one flat list of {id, its group's number, input_bytes, total_ms, queue_ms, tokens, length of the body,
--   nonce, trace, false or {idempotency, fingerprint, again}}, 7 ms that a request is kept after its deadline, 8 TIME in
--   ms when the call was made, at the latest (0 = not known): one that lay in the socket of a stopped Redis comes late,
--   9 ms that a run takes, 10 the bodies, one after another, 11 '1' where an id may stand in the call twice.
-- Returns packed verdicts {outcome, remaining, reset_ms, retry_after_ms, depth, stored id, tokens left, tokens reset_ms,
--   in use, {{quota left, quota reset_ms}...}, shadowed}, one a submission.
-- include: prelude, wake, row, ratelimit/bucket, ratelimit/quota, ratelimit/customer, ratelimit/customer_save, ratelimit/shedding, epoch, asking, idempotency, retry_budget, entering, judging, verdicts
local keep_ms, made, run_ms, bodies = tonumber(ARGV[7]), tonumber(ARGV[8]), tonumber(ARGV[9]), ARGV[10]
local came, keys, told, from = made > 0 and math.min(now, made) or now, request_keys(), {}, 1
local look = ARGV[11] == '1' or call('EXISTS', unpack(keys)) > 0 -- hardly ever: a call that is sent again
if not epoch_us then begin_epoch() end

-- decide(g, o, key) -> outcome, ms until trying again pays, what was paid, whose stored answer is to be replayed, which
-- refusal a tier in shadow would have given.
local function decide(g, o, key)
  if look and call('EXISTS', key) == 1 then return 'duplicate', 0 end
  local total_ms, tokens, rare = asked[o + TOTAL_MS], asked[o + TOKENS], asked[o + RARE]
  if came + total_ms <= now then return 'too_late', 0 end
  if rare then
    if rare[3] then return 'accepted', 0, 'nothing' end -- it was judged and paid for when it came first
    local earlier, id = held(rare[1], rare[2])
    if earlier then return earlier, 0, nil, id end
  end
  local t = g.tier
  local limit, retry_ms = judge(asked[o + ID], g, tokens, capacity, math.min(asked[o + QUEUE_MS], total_ms - run_ms))
  if limit and not t.shadow then return limit, retry_ms end
  if depth[t.name] >= t.max_depth then return 'queue_full', 0 end
  if limit then return 'accepted', 0, 'nothing', nil, limit end
  if g.key then spend(g.key) end
  spend(g.pool)
  return 'accepted', 0, charge(g.customer, tokens)
end

for i, key in ipairs(keys) do
  local o = (i - 1) * SIZE
  local g, length = group(asked[o + GROUP]), asked[o + LENGTH]
  local outcome, retry_ms, paid, stored_id, shadowed = decide(g, o, key)
  if outcome == 'accepted' then
    store(g, o, key, string.sub(bodies, from, from + length - 1), keep_ms, came, paid)
    hold_lease(g.customer, asked[o + ID], came + asked[o + TOTAL_MS])
    depth[g.tier.name] = depth[g.tier.name] + 1
  end
  from = from + length
  told[i] = verdict(outcome, g, math.ceil(retry_ms), stored_id, shadowed)
end
if enter() then
  save_buckets()
  save_customers()
  local waiting = 0
  for _, count in pairs(depth) do waiting = waiting + count end
  wake_at(waiting)
end
return array(told)
