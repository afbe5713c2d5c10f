#!lua flags=allow-oom
-- release: a stopping worker returns a running batch; no attempt is counted, and the order is kept. A batch that was lost
-- before stays together: its requests may be the cause of the loss, and must not join new ones.
-- KEYS[1] leases. ARGV: batch_id, token, lease_ms, keep_ms of a batch.
-- Returns the number of ids that are queued again, first in their tier queues or as a batch; -1 if the token does not own it.
-- include: prelude, slots, wake, row, ratelimit/metered, refund, backlogs, settlement, finalize, batch, requeue, retry_budget, coalescing_keys, followers
local batch = load_batch(batch_id)
if not batch or batch.state ~= 'running' or batch.token ~= token then return -1 end
local entries, had_losses = {}, batch.losses > 0
each_member(batch, function(id, row, list)
  if batch.slots and ends_as_left(id, row, batch, NO_RUN) then call('LREM', list, 1, id)
  else entries[#entries + 1] = {id, row} end
end)
if had_losses and #entries > 0 then
  for _, entry in ipairs(entries) do
    if batch.slots then restart_wait(entry[1], entry[2]) end
  end
  call('LREM', P .. 'batch_queue', 0, batch.id)
  push_first(batch, #entries, lease_ms, keep_ms)
else
  -- Newest first, so that the oldest is at the head.
  for i = #entries, 1, -1 do requeue(entries[i][1], entries[i][2]) end
  delete_batch(batch)
end
wake()
flush()
return #entries
