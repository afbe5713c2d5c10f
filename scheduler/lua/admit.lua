#!lua
-- admit: may these enter now? Each one is admitted whole or not at all; a rejection spends nothing. All that it ever
-- writes is that a rate has changed, once, on a bucket that it found empty.
-- Idempotent by request id: an id that is stored already is told `duplicate` and nothing is done again.
-- KEYS[1] leases (routes the call). ARGV: 1 prefix, 2 gateway id, 3 capacity in requests/s (0 = not known),
--   4 packed tier limits {name, rate, burst, max_depth, ahead, shed_depth, shed_wait_ms, share, shadow}, 5 packed groups
--   {tier, customer, key, model, key rate, key burst, limits as in customer}, 6 packed
--   submissions, one flat list of {id, its group's number, input_bytes, total_ms, queue_ms, tokens, length of the body,
--   nonce, trace, false or RARE as asking has it}, 7 ms that a request is kept after its deadline, 8 TIME in
--   ms when the call was made, at the latest (0 = not known): one that lay in the socket of a stopped Redis comes late,
--   9 ms that a run takes, 10 the bodies, one after another, 11 '1' where an id may stand in the call twice,
--   12 ms that an answer is kept for its Idempotency-Key, 13 answers and 14 bytes of them that are kept for one customer,
--   15 ms between two passes of a scheduler, 16 packed kinds of buckets as in customer.
-- Returns packed verdicts {outcome, what is left of its limits, retry_after_ms, depth, stored id, shadowed, reply where it has
--   ended already}, one a submission.
-- include: prelude, protocol, wake, row, ratelimit/bucket, ratelimit/quota, ratelimit/customer, ratelimit/shedding, epoch, asking, ratelimit/charge, retry_budget, entering, same, coalescing, deciding
if other_protocol() then return other_protocol() end
local keep_ms, bodies = tonumber(ARGV[7]), ARGV[10]
local told, from, party, until_i = {}, 1, nil, 0
if not epoch_us then begin_epoch() end

for i, key in ipairs(keys) do
  local o = (i - 1) * SIZE
  local g, length, rare = group(asked[o + GROUP]), asked[o + LENGTH], asked[o + RARE]
  if i > until_i then party = nil end
  if rare and rare[4] > 1 then party, until_i = party_of(g, keys, i, rare[4]), i + rare[4] - 1 end
  local outcome, retry_ms, paid, stored_id, shadowed = decide(g, o, key, party)
  local reply = outcome == 'accepted' and take_in(g, o, key, string.sub(bodies, from, from + length - 1), keep_ms, came, paid)
  from = from + length
  told[i] = with_reply(verdict(outcome, g, math.ceil(retry_ms), stored_id, shadowed), reply)
end
if enter() then
  note_answered()
  save_buckets()
  save_customers()
  make_room()
  local waiting = 0
  for _, count in pairs(depth) do waiting = waiting + count end
  wake_at(waiting)
end
return array(told)
