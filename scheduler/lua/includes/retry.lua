-- retry: what becomes of a batch that its worker lost (needs prelude, ending and batch).
-- Members with budget and time left stay and go to the head of the line as one batch; the others end here.
local DLQ_CAP = 10000

-- retry(batch, cause, rule) -> number of members retried. rule = {budget, min_left_ms, lease_ms}.
local function retry(batch, cause, rule)
  local kept = 0
  each_member(batch, function(id, row, list)
    local losses = redis.call('HINCRBY', P .. 'request:' .. id, 'losses', 1)
    local code = nil
    if losses > rule.budget then code = cause
    elseif row[DEADLINE] - now < rule.min_left_ms then code = cause == 'gpu_timeout' and cause or 'deadline_exceeded' end
    if code == nil then kept = kept + 1 return end
    close(id, row, 'failed', code, batch, NO_RUN)
    redis.call('LREM', list, 1, id)
    if losses > rule.budget then
      redis.call('LPUSH', P .. 'dlq', cmsgpack.pack({id, code, losses, batch.id, batch.worker, now}))
      redis.call('LTRIM', P .. 'dlq', 0, DLQ_CAP - 1)
    end
  end)
  if kept == 0 then drop_batch(batch) return 0 end
  redis.call('HSET', P .. 'batch:' .. batch.id, 'state', 'formed', 'size', kept, 'worker', '', 'token', '')
  lease(batch, rule.lease_ms)
  redis.call('LREM', P .. 'batch_queue', 0, batch.id) -- a short list, where it may still stand from before its claim
  redis.call('LPUSH', P .. 'batch_queue', batch.id)
  return kept
end
