#!lua flags=allow-oom
-- cordon: which workers are to claim nothing, as PostgreSQL has it; told again and again, since Redis may be emptied.
-- KEYS[1] leases. ARGV: 1 prefix, 2 packed {worker id...}.
-- Returns how many were added or taken out. The member '' says that somebody has told this Redis: worker_beat knows by it
--   whether a worker that is not named is free, or was forgotten.
-- include: prelude
local key, wanted, changed = P .. 'cordoned', {['']= true}, 0
for _, id in ipairs(cmsgpack.unpack(ARGV[2])) do wanted[id] = true end
for _, id in ipairs(redis.call('SMEMBERS', key)) do
  if wanted[id] then wanted[id] = nil
  else
    redis.call('SREM', key, id)
    changed = changed + 1
  end
end
for id in pairs(wanted) do
  redis.call('SADD', key, id)
  if id ~= '' then changed = changed + 1 end
end
return changed
