-- dead_letter: failed requests that are kept for inspection and requeue (needs finalize).
local DLQ_MAX = 10000

-- finalize_as_dead_letter(id, row, code, batch, run): ends it as failed, and writes a dead letter with its body, which
-- `finalize` deletes, and with the workers that lost it, the last of which is the batch's worker.
local function finalize_as_dead_letter(id, row, code, batch, run)
  local stored = call('HMGET', P .. 'request:' .. id, 'body', 'lost_by')
  row.is_dead_letter = true
  if not finalize(id, row, 'failed', code, batch, run) then return end
  local workers = {}
  for worker in string.gmatch((stored[2] or '') .. ' ' .. batch.worker, '%S+') do workers[#workers + 1] = worker end
  local account = account_of(row)
  dead_letters[#dead_letters + 1] = {'d', id, account.customer, account.tier, code, attempts(batch), workers, stored[1] or ''}
  call('LPUSH', P .. 'dlq', id)
  call('LTRIM', P .. 'dlq', 0, DLQ_MAX - 1)
end
