#!lua
-- admit: may these enter now? Each one is admitted whole or not at all; a rejection changes no key.
-- Idempotent by request id: an id that is stored already is told `duplicate` and nothing is done again.
-- KEYS[1] leases (routes the call). ARGV: 1 prefix, 2 gateway id, 3 capacity in requests/s (0 = not known),
--   4 packed tier limits {name, rate, burst, max_depth, ahead, shed_depth, shed_wait_ms}, 5 packed submissions
--   {id, tier, customer, key, nonce, model, input_bytes, total_ms, queue_ms, rate, burst, trace},
--   6 ms that a request is kept after its deadline, 7... the bodies, one a submission.
-- Returns packed verdicts {outcome, remaining, reset_ms, retry_after_ms, depth}, one a submission.
-- include: prelude, wake, ratelimit/bucket
local gateway, capacity, keep_ms = ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[6])
if not epoch_us then redis.call('SET', P .. 'epoch', string.format('%.0f', now_us)) end
local tiers, depth, pushes, accepted, verdicts = {}, {}, {}, {}, {}
for _, t in ipairs(cmsgpack.unpack(ARGV[4])) do
  tiers[t[1]] = {rate = t[2], burst = t[3], max_depth = t[4], ahead = t[5], shed_depth = t[6], shed_wait_ms = t[7]}
  depth[t[1]], pushes[t[1]] = redis.call('LLEN', P .. 'queue:' .. t[1]), {}
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

local function store(s, body, key, share)
  spend(key, 1)
  spend(share, 1)
  depth[s[2]] = depth[s[2]] + 1
  table.insert(pushes[s[2]], s[1])
  local row = P .. 'request:' .. s[1]
  redis.call('HSET', row, 'state', 'queued', 'tier', s[2], 'gw', gateway, 'cust', s[3], 'nonce', s[5],
    'at', now, 'dl', now + s[8], 'qdl', now + s[9], 'body', body)
  redis.call('PEXPIRE', row, s[8] + keep_ms)
  accepted[#accepted + 1] = {'a', s[1], s[3], s[4], s[2], s[6], gateway, s[7], s[12]}
end

for i, s in ipairs(cmsgpack.unpack(ARGV[5])) do
  local tier = tiers[s[2]]
  local key, share = bucket(P .. 'rl:key:' .. s[4], s[10], s[11]), bucket(P .. 'rl:tier:' .. s[2], tier.rate, tier.burst)
  local outcome, retry_ms = 'duplicate', 0
  if redis.call('EXISTS', P .. 'request:' .. s[1]) == 0 then outcome, retry_ms = judge(s[2], tier, key, share, s[9]) end
  if outcome == 'accepted' then store(s, ARGV[6 + i], key, share) end
  verdicts[i] = {outcome, math.max(0, key.tokens), ms_until(key, key.burst), math.ceil(retry_ms), depth[s[2]]}
end
if #accepted > 0 then
  for name, ids in pairs(pushes) do if #ids > 0 then redis.call('LPUSH', P .. 'queue:' .. name, unpack(ids)) end end
  redis.call('LPUSH', P .. 'outbox', cmsgpack.pack(accepted))
  save_buckets()
  local waiting = 0
  for _, count in pairs(depth) do waiting = waiting + count end
  wake_at(waiting)
end
return cmsgpack.pack(verdicts)
