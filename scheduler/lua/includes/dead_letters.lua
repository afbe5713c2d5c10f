-- dead_letters: requests given up for good, kept for people to look at or to send again (needs prelude, row and ending).
local DLQ_CAP = 10000

-- bury(id, row, code, batch, run): close it as failed, and write a letter with its body, which `close` deletes, and
-- with the workers that lost it, the last of them the batch's own.
local function bury(id, row, code, batch, run)
  local kept = call('HMGET', P .. 'request:' .. id, 'body', 'lost_by')
  row.buried = true
  if not close(id, row, 'failed', code, batch, run) then return end
  local workers = {}
  for worker in string.gmatch((kept[2] or '') .. ' ' .. batch.worker, '%S+') do workers[#workers + 1] = worker end
  local p = party(row)
  letters[#letters + 1] = {'d', id, p.customer, p.tier, code, attempts(batch), workers, kept[1] or ''}
  call('LPUSH', P .. 'dlq', id)
  call('LTRIM', P .. 'dlq', 0, DLQ_CAP - 1)
end
