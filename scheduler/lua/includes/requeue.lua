-- requeue: a request of a batch returns to the head of its queue (needs prelude and row).
-- requeue(id, row): no attempt is counted, and its queue timeout no longer applies.
local function requeue(id, row)
  local key, env = P .. 'request:' .. id, row[ENV]
  call('HSET', key, 'state', 'queued', 'env', sub(env, 1, 28) .. sub(env, 15, 27) .. sub(env, 42))
  call('HDEL', key, 'batch')
  call('RPUSH', P .. 'queue:' .. account_of(row).tier, id)
end
