-- requeue: a request of a batch returns to the head of its queue (needs prelude, row and batch).
-- requeue(id, row): no attempt is counted, and its queue timeout begins anew.
local function requeue(id, row)
  local key = P .. 'request:' .. id
  restart_wait(id, row)
  call('HSET', key, 'state', 'queued')
  call('HDEL', key, 'batch')
  call('RPUSH', P .. 'queue:' .. account_of(row).tier, id)
end
