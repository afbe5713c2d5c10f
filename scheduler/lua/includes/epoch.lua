-- epoch: when this Redis was first used, in microseconds (needs prelude and protocol). Another one than before tells gateways and
-- schedulers that Redis may have lost what it was told: it came back empty, or began again from an older dump, or it is a
-- replica that took over. `epoch_run` is the run_id of the server that the epoch is of, as INFO says; a user of an older
-- access list may not read it, and then only an emptied Redis is noticed.
local function begin_epoch()
  local info = redis.pcall('INFO', 'server')
  local run = type(info) == 'string' and string.match(info, 'run_id:(%w+)')
  local before = run and redis.pcall('GET', P .. 'epoch_run')
  local begins = string.format('%.0f', now_us)
  if type(before) == 'string' and before ~= run then call('SET', P .. 'epoch', begins)
  else call('SET', P .. 'epoch', begins, 'NX') end
  if run and before ~= run then redis.pcall('SET', P .. 'epoch_run', run) end
  return call('GET', P .. 'epoch')
end

-- note_protocol(): where none is noted, after Redis was emptied, it is this one.
local function note_protocol()
  if not stored then redis.pcall('SET', 'protocol', PROTOCOL, 'NX') end
end
