#!lua flags=allow-oom
-- renew: the owner of a running batch renews its lease, and gets the ids that are left if some requests have ended.
-- KEYS[1] leases. ARGV: 1 prefix, 2 batch id, 3 token, 4 lease ms, 5 ms that a batch is kept, 6 number of requests that the
--   owner knows of (0: do not return ids).
-- Returns 1, or 0 if the token no longer owns the batch: its work must be dropped. If there are fewer requests than the owner
--   knows of: the ids that are left.
-- include: prelude, row, batch
local batch = load_batch(ARGV[2])
if not batch or batch.state ~= 'running' or batch.token ~= ARGV[3] then return 0 end
lease(batch, tonumber(ARGV[4]))
keep(batch, tonumber(ARGV[5]))
local known, left = tonumber(ARGV[6]), {}
if known == 0 then return 1 end
for _, tier in ipairs(batch.tiers) do known = known - call('LLEN', P .. 'inflight:' .. tier .. ':' .. batch.id) end
if known <= 0 then return 1 end
for _, tier in ipairs(batch.tiers) do
  for _, id in ipairs(call('LRANGE', P .. 'inflight:' .. tier .. ':' .. batch.id, 0, -1)) do left[#left + 1] = id end
end
return left
