#!lua flags=allow-oom
-- fail: a worker reports that its model process lost a running batch (killed, crashed or hung).
-- KEYS[1] leases. ARGV: 1 prefix, 2 batch id, 3 token, 4 cause (error code), 5 retry budget, 6 minimum ms left for a retry,
--   7 lease ms, 8 ms that a batch is kept.
-- Returns the number of requests that are retried at the head of batch_queue, or -1 if the token does not own the batch.
-- include: prelude, slots, wake, row, ratelimit/metered, refund, backlogs, settlement, finalize, batch, retry_budget, retry, coalescing_keys, followers
local batch = load_batch(ARGV[2])
if not batch or batch.state ~= 'running' or batch.token ~= ARGV[3] then return -1 end
local rule = {reported = true, max_losses = tonumber(ARGV[5]), min_left_ms = tonumber(ARGV[6]), lease_ms = tonumber(ARGV[7]),
  keep_ms = tonumber(ARGV[8])}
local kept = retry(batch, ARGV[4], rule)
flush()
wake()
return kept
