#!lua flags=allow-oom
-- claim: a worker takes a ready batch: owner, fencing token, running lease, one attempt counted.
-- KEYS[1] leases. ARGV: 1 prefix, 2 batch id, 3 worker id, 4 token, 5 lease ms,
--   6 ms of silence after which a gateway is gone, 7 bytes of bodies with which the answer ends.
-- Returns nil where the batch is not there to be claimed, else packed {{id, ms left, attempt, body}...}: the members
--   that may run; the others (no time left, nobody waits) end here, and a batch that is left empty is closed. A body that
--   has no room is nil: `bodies` has it.
-- include: prelude, protocol, wake, row, replays, repaying, ending, owners, batch, retry_budget, same, riders, sharing
if other_protocol() then return other_protocol() end
local batch = load_batch(ARGV[2])
if not batch or batch.state ~= 'formed' then
  wake() -- a finish pushed no token because this id stood in line
  return false
end
call('HSET', P .. 'batch:' .. batch.id, 'state', 'running', 'worker', ARGV[3], 'token', ARGV[4])
batch.worker = ARGV[3]
lease(batch, tonumber(ARGV[5]))
local room, fields = tonumber(ARGV[7]), {'body'} -- once there is no room, bodies are not even read
local out, gone_ms, attempt = {}, tonumber(ARGV[6]), packed[batch.losses + 1]

-- bin_head[n]: a body may hold any bytes, and Lua's msgpack knows no bin.
local bin_head = setmetatable({}, {__index = function(known, n)
  known[n] = n < 65536 and struct.pack('>BI2', 0xc5, n) or struct.pack('>BI4', 0xc6, n)
  return known[n]
end})

each_member(batch, function(id, row, list)
  local left, body, code = row[DEADLINE] - now, room > 0 and (row[WHO] or ''), nil
  if left <= 0 or now - row[AT] >= gone_ms then -- else nobody has to know whose it is
    row[WHO] = call('HGET', P .. 'request:' .. id, 'who')
    if not party(row) then
      set_aside(id, row)
      call('LREM', list, 1, id)
      return
    end
    code = left <= 0 and 'deadline_exceeded' or abandoned(row, gone_ms) and 'gateway_lost'
  end
  if not code then
    out[#out + 1] = '\148' .. text_head[#id] .. id .. packed[left] .. attempt .. (body and bin_head[#body] .. body or '\192')
    room = room - (body and #body or 0)
    if room <= 0 then fields[1] = 'state' end
    return
  end
  close(id, row, 'failed', code, batch, NO_RUN)
  call('LREM', list, 1, id)
end, fields)
flush()
if #out == 0 then drop_batch(batch) end
wake_free()
return array(out)
