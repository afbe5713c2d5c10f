#!lua flags=allow-oom
-- renew: the owner of a running batch moves its lease on.
-- KEYS[1] leases. ARGV: 1 prefix, 2 batch id, 3 token, 4 lease ms, 5 ms that a batch is kept.
-- Returns 1, or 0 where the token no longer owns the batch: its work must be dropped.
-- include: prelude, row, repaying, ending, batch
local batch = load_batch(ARGV[2])
if not batch or batch.state ~= 'running' or batch.token ~= ARGV[3] then return 0 end
lease(batch, tonumber(ARGV[4]))
keep(batch, tonumber(ARGV[5]))
return 1
