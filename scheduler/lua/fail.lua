#!lua flags=allow-oom
-- fail: a worker reports that its model process lost a running batch (killed, crashed or hung).
-- KEYS[1] leases. ARGV: batch_id; token; cause (error code); max_losses that a request survives; min_left_ms for a retry; lease_ms;
--   keep_ms of a batch.
-- Returns the number of requests that are retried at the head of batch_queue, or -1 if the token does not own the batch.
-- include: prelude, slots, wake, row, ratelimit/metered, refund, backlogs, settlement, finalize, batch, retry_budget, dead_letter, retry, coalescing_keys, followers
local batch = load_batch(batch_id)
if not batch or batch.state ~= 'running' or batch.token ~= token then return -1 end
local rule = {reported = true, max_losses = max_losses, min_left_ms = min_left_ms, lease_ms = lease_ms, keep_ms = keep_ms}
local kept = retry(batch, cause, rule)
flush()
wake()
return kept
