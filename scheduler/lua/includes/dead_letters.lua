-- dead_letters: requests given up for good, kept for people to look at or to send again (needs prelude and ending).
local DLQ_CAP = 10000

-- bury(id, row, code, batch, run): close it as failed, and write a letter with its body, which `close` deletes, and
-- with the workers that lost it, the last of them the batch's own.
local function bury(id, row, code, batch, run)
  local kept = redis.call('HMGET', P .. 'request:' .. id, 'body', 'lost_by')
  if not close(id, row, 'failed', code, batch, run) then return end
  local workers = {}
  for worker in string.gmatch((kept[2] or '') .. ' ' .. batch.worker, '%S+') do workers[#workers + 1] = worker end
  letters[#letters + 1] = {'d', id, row[CUSTOMER], row[TIER], code, tonumber(row[TRIES] or 0), workers, kept[1] or ''}
  redis.call('LPUSH', P .. 'dlq', id)
  redis.call('LTRIM', P .. 'dlq', 0, DLQ_CAP - 1)
end
