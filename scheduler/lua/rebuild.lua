#!lua flags=allow-oom
-- rebuild: add ids to an index if their rows say that they belong there.
-- KEYS[1] leases. ARGV: index: 'leases' or 'queue:<tier>'; packed_ids: of batches, or of requests, the newest first; lease_ms;
--   accepted_until, in ms: only requests accepted until then, since later ones are in the new queue.
-- Returns how many. A batch gets a full lease: the worker that runs it renews it, and the reaper processes the others.
-- include: prelude, slots, row, ratelimit/metered, refund, backlogs, settlement, finalize, batch, retry_budget, coalescing_keys, followers
local ids, tier, count = cmsgpack.unpack(packed_ids), string.match(index, '^queue:(.*)$'), 0
for _, id in ipairs(ids) do
  if not tier then
    if call('EXISTS', P .. 'batch:' .. id) == 1 then count = count + call('ZADD', P .. 'leases', 'NX', now + lease_ms, id) end
  else
    local row = read_row(id)
    if row[STATE] == 'queued' and row[AT] <= accepted_until and account_of(row).tier == tier then
      call('RPUSH', P .. index, id)
      count = count + 1
    end
  end
end
flush()
return count
