#!lua flags=allow-oom
-- finish_part: a worker with slots ends requests of its running batches, each by itself. A batch is closed with its last request.
-- KEYS[1] leases. ARGV: worker_id; packed_batches {{batch id, token}...}; packed_outcomes: one flat list of {number of its batch,
--   id, code, gpu_ms, tokens, bytes, length, cost_ms: its part of the model's time}, where an empty code means completed, '-' that
--   it returns to the head of its queue, '-withdrawn' the same, once, and '!<code>' that its run was lost for that cause; tails: the
--   last fields of their replies as in `finish`; max_losses, min_left_ms, lease_ms, keep_ms as in `fail`; slot_count of the worker,
--   and its free slots, nil if a claim is in progress.
-- Returns {outcomes that were too late (stale), 1 if `share` has more to do, else 0}.
-- include: prelude, slots, wake, row, ratelimit/metered, refund, backlogs, settlement, finalize, batch, retry_budget, dead_letter, retry, requeue, coalescing_keys, followers
local outcomes, SIZE, batches, again = cmsgpack.unpack(packed_outcomes), 8, {}, {}
for i, owned in ipairs(cmsgpack.unpack(packed_batches)) do
  local batch = load_batch(owned[1])
  batches[i] = batch and batch.state == 'running' and batch.token == owned[2] and batch
end
local rule = {max_losses = max_losses, min_left_ms = min_left_ms, lease_ms = lease_ms, keep_ms = keep_ms}
local tail_start, stale = 1, 0

-- end_member(id, row, batch, code, run): ends, retries or returns one request that its batch still has.
local function end_member(id, row, batch, code, run)
  if (code == 'cancelled' or string.find(code, '^[-!]')) and ends_as_left(id, row, batch, run) then -- no retry
  elseif code == '-' or code == '-withdrawn' then
    if code == '-withdrawn' then call('HSET', P .. 'request:' .. id, 'withdrawn', '1') end
    if batch.losses > 0 then -- it stays alone: its attempts are counted, and it may be the cause of the losses
      leave_batch(id, row)
      return run_alone(id, row, batch, batch.losses, rule)
    end
    again[#again + 1] = {id = id, row = row}
    return
  elseif string.sub(code, 1, 1) == '!' then return retry_member(id, row, batch, string.sub(code, 2), rule)
  elseif code == 'poison_request' then finalize_as_dead_letter(id, row, code, batch, run)
  else finalize(id, row, code == '' and 'completed' or 'failed', code, batch, run) end
  leave_batch(id, row)
end

for o = 0, #outcomes - SIZE, SIZE do
  local batch, id, tail_end = batches[outcomes[o + 1]], outcomes[o + 2], tail_start + outcomes[o + 7]
  local tail, row = string.sub(tails, tail_start, tail_end - 1), batch and read_row(id)
  tail_start = tail_end
  if row and row[STATE] == 'processing' and row[BATCH] == batch.id then
    end_member(id, row, batch, outcomes[o + 3],
      {outcomes[o + 4], outcomes[o + 5], outcomes[o + 6], tail, outcomes[o + 8], true})
  else
    stale = stale + 1
    if batch and not is_open(row) then -- a damaged row; its id would keep the batch
      for _, tier in ipairs(batch.tiers) do call('LREM', P .. 'inflight:' .. tier .. ':' .. batch.id, 1, id) end
    end
  end
end
for i = #again, 1, -1 do -- newest first, so that the oldest is at the head
  leave_batch(again[i].id, again[i].row)
  requeue(again[i].id, again[i].row)
end
flush() -- first: if an index is broken, the replies are sent, and the batches can be dropped later
for _, batch in ipairs(batches) do
  if batch and is_empty(batch) then delete_batch(batch) end
end
slots.report(worker_id, free, slot_count, #outcomes / SIZE)
if #again > 0 then wake() else wake_for_slot() end
return {stale, followers_left and 1 or 0}
