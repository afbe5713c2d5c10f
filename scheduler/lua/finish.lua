#!lua flags=allow-oom
-- finish: the owner of a running batch ends its requests, each once, and closes the batch.
-- KEYS[1] leases. ARGV: batch_id; token; packed_outcomes: one flat list of {id, code, gpu_ms, tokens, bytes, length, cost_ms: its
--   share of gpu_ms}, where an empty code means completed; tails: the last fields of their replies, concatenated, each of its
--   length: packed gpu_ms, tokens, model version, output, output tokens, finish reason, '', cost_ms as a float; more_follow: 1 if
--   more outcomes follow in another call: then the batch is not closed yet.
-- Returns {outcomes that were too late (stale): all of them if the token does not own the batch, 1 if `share` has more to
--   do, else 0}.
-- include: prelude, slots, wake, row, ratelimit/metered, refund, backlogs, settlement, finalize, batch, retry_budget, dead_letter, coalescing_keys, followers
local SIZE = 7
local outcomes = cmsgpack.unpack(packed_outcomes)
local batch = load_batch(batch_id)
if not batch or batch.state ~= 'running' or batch.token ~= token then return {#outcomes / SIZE, 0} end
local offset_of, tail_start, stale = {}, 1, #outcomes / SIZE
for o = 0, #outcomes - SIZE, SIZE do
  offset_of[outcomes[o + 1]] = o
  local tail_end = tail_start + outcomes[o + 6]
  outcomes[o + 6], tail_start = string.sub(tails, tail_start, tail_end - 1), tail_end
end
local run = {0, 0, 0, '', 0, true} -- of one member after the other
each_member(batch, function(id, row)
  local o = offset_of[id]
  if not o then -- the worker sent no outcome for it, which is a bug
    if more_follow ~= 1 then finalize(id, row, 'failed', 'invalid_output', batch, NO_RUN) end
    return
  end
  local code = outcomes[o + 2]
  run[1], run[2], run[3], run[4], run[5], run[6] =
    outcomes[o + 3], outcomes[o + 4], outcomes[o + 5], outcomes[o + 6], outcomes[o + 7], true
  if code == 'poison_request' then finalize_as_dead_letter(id, row, code, batch, run)
  else finalize(id, row, code == '' and 'completed' or 'failed', code, batch, run) end
  stale = stale - 1
end)
if more_follow == 1 then
  flush()
  return {stale, followers_left and 1 or 0}
end
flush() -- first: if an index is broken, the replies are sent, and the batch can be dropped later
delete_batch(batch)
wake_for_worker(true)
return {stale, followers_left and 1 or 0}
