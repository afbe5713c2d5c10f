#!lua flags=allow-oom
-- cordon: store which workers must not claim batches, as in PostgreSQL; called again and again, because Redis may lose it.
-- KEYS[1] leases. ARGV: packed_workers {worker id...}; tpot_ms: the smallest `models.tpot_ms` of the pool, which is stored beside
--   it; 0: none.
-- Returns how many were added or removed. The member '' marks that the list was stored: without it, worker_beat cannot
--   distinguish a worker that is not cordoned from a lost list.
-- include: prelude
local key, cordoned, changed = P .. 'cordoned', {['']= true}, 0
for _, id in ipairs(cmsgpack.unpack(packed_workers)) do cordoned[id] = true end
for _, id in ipairs(call('SMEMBERS', key)) do
  if cordoned[id] then cordoned[id] = nil
  else
    call('SREM', key, id)
    changed = changed + 1
  end
end
for id in pairs(cordoned) do
  call('SADD', key, id)
  if id ~= '' then changed = changed + 1 end
end
-- By pcall: older ACL rules do not allow it.
if tpot_ms == '0' then redis.pcall('DEL', P .. 'tpot_ms') else redis.pcall('SET', P .. 'tpot_ms', tpot_ms, 'PX', 60000) end
return changed
