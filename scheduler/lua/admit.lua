#!lua
-- admit: decide on submissions; each is admitted completely or not at all. A rejection charges nothing; it writes only, once, the
-- changed rate of an empty bucket. Idempotent by request id: an id that is stored already gets `duplicate`, without effect.
-- KEYS[1] leases (routes the call). ARGV: gateway_id; capacity in requests/s (0 = unknown); packed_tiers: limits {name, rate,
--   burst, max_depth, ahead, shed_depth, shed_wait_ms, share, shadow, places in the tier queue, open requests within the share};
--   packed_groups: {tier, customer, key, model, key rate, key burst, limits as in customer}; packed_submissions: one flat list of
--   {id, number of the group, input_bytes, total_ms, queue_ms, tokens, length of the body, nonce, trace, false or RARE as in
--   submissions}; keep_ms that a request is kept after its deadline; sent_at: latest TIME in ms at which the call was sent (0 =
--   unknown): a call that was buffered while Redis was suspended arrives late; run_ms that a run takes; bodies, concatenated;
--   has_repeats: 1 if an id may be in the call twice; replay_ms that a reply is stored for its Idempotency-Key, replay_rows and
--   replay_bytes of such replies of one customer; pass_ms between the passes of a scheduler; packed_kinds of buckets as in
--   customer; packed_endpoints of the groups, for the audit; packed_background: '', or whether each group waits in the
--   background queue of its tier; packed_homes: '', or the Residence of the customer of each group.
-- Returns packed {groups, verdicts}: {remaining limits, depth} of each group after the call; of each submission nil if it was
--   accepted, else, or if there is more to report, {outcome, retry_after_ms, stored id, shadowed, reply if it has ended already}.
-- include: prelude, protocol, wake, row, ratelimit/metered, ratelimit/bucket, ratelimit/quota, ratelimit/share, ratelimit/customer, ratelimit/shedding, epoch, backlogs, backlog_push, submissions, ratelimit/charge, retry_budget, enqueue, coalescing_keys, coalescing, decisions, room
if protocol_error() then return protocol_error() end
local verdicts, body_start, together, together_end = {}, 1, nil, 0

-- evaluate_one(i, key, g, o, body) -> the verdict of a submission that does not belong to a group with room.
local function evaluate_one(i, key, g, o, body)
  local rare = submissions[o + RARE]
  if i > together_end then together = nil end
  if rare and rare[4] > 1 then together, together_end = evaluate_together(g, keys, i, rare[4]), i + rare[4] - 1 end
  local outcome, retry_ms, charged, stored_id, shadowed = decide(g, o, key, together)
  local reply = outcome == 'accepted' and accept(g, o, key, body, charged)
  return outcome == 'accepted' and not shadowed and not reply and ACCEPTED or
    pack_verdict(outcome, math.ceil(retry_ms), stored_id, shadowed, reply)
end

if not epoch_us then begin_epoch() end
find_room()

for i, key in ipairs(keys) do
  local o = (i - 1) * SIZE
  local g, rare, body_end = groups[submissions[o + GROUP]], submissions[o + RARE], body_start + submissions[o + LENGTH] - 1
  local body = string.sub(bodies, body_start, body_end)
  if not rare and g.room and not may_be_known and i > together_end and arrived_at + submissions[o + TOTAL_MS] > now then
    verdicts[i] = ACCEPTED
    accept_in_room(g, o, key, body)
  else verdicts[i] = evaluate_one(i, key, g, o, body) end
  body_start = body_end + 1
end
charge_room()
if enqueue() then
  record_cached_outcomes()
  save_buckets()
  save_customers()
  evict_replays()
  local waiting = 0
  for _, count in pairs(depth) do waiting = waiting + count end
  if packed_background ~= '' or backlogs.urgent then wake() else wake_for_depth(waiting) end
end
save_demand()
return '\146' .. pack_groups() .. pack_array(verdicts)
