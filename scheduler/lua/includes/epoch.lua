-- epoch: when this Redis was first used, in microseconds (needs prelude and protocol). A changed epoch shows gateways and
-- schedulers that Redis may have lost data: it was emptied, loaded an older dump, or is a replica that took over. `epoch_run`
-- is the run_id (from INFO) of the server that set the epoch. A Redis user with older ACL rules may not read it; then only an
-- emptied Redis is detected.
local function begin_epoch()
  local info = redis.pcall('INFO', 'server')
  local run_id = type(info) == 'string' and string.match(info, 'run_id:(%w+)')
  local known_run_id = run_id and redis.pcall('GET', P .. 'epoch_run')
  local epoch = string.format('%.0f', now_us)
  if type(known_run_id) == 'string' and known_run_id ~= run_id then call('SET', P .. 'epoch', epoch)
  else call('SET', P .. 'epoch', epoch, 'NX') end
  if run_id and known_run_id ~= run_id then redis.pcall('SET', P .. 'epoch_run', run_id) end
  return call('GET', P .. 'epoch')
end

-- store_protocol(): stores this version if none is stored, as after a loss of data.
local function store_protocol()
  if not stored_protocol then redis.pcall('SET', T .. 'protocol', PROTOCOL, 'NX') end
end
