#!lua flags=allow-oom
-- renew: the owner of running batches renews their leases, and gets the ids that are left if some requests have ended.
-- KEYS[1] leases. ARGV: packed_batches {{batch id, token, number of requests that the owner knows of (0: do not return ids)}...};
--   lease_ms; keep_ms of a batch.
-- Returns for each batch 1, or 0 if the token no longer owns it: its work must be dropped. If there are fewer requests than the
--   owner knows of: the ids that are left.
-- include: prelude, slots, row, batch
local function renew(id, token, known)
  local batch, left = load_batch(id), {}
  if not batch or batch.state ~= 'running' or batch.token ~= token then return 0 end
  lease(batch, lease_ms)
  keep(batch, keep_ms)
  if known == 0 then return 1 end
  for _, tier in ipairs(batch.tiers) do known = known - call('LLEN', P .. 'inflight:' .. tier .. ':' .. batch.id) end
  if known <= 0 then return 1 end
  for _, tier in ipairs(batch.tiers) do
    for _, member in ipairs(call('LRANGE', P .. 'inflight:' .. tier .. ':' .. batch.id, 0, -1)) do left[#left + 1] = member end
  end
  return left
end

local found = {}
for i, owned in ipairs(cmsgpack.unpack(packed_batches)) do found[i] = renew(owned[1], owned[2], owned[3]) end
return found
