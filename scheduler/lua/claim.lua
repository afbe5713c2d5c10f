#!lua flags=allow-oom
-- claim: a worker takes a ready batch: owner, fencing token, running lease, one attempt counted.
-- KEYS[1] leases. ARGV: 1 prefix, 2 batch id, 3 worker id, 4 token, 5 lease ms,
--   6 ms of silence after which a gateway is gone, 7 bytes of bodies with which the answer ends.
-- Returns nil where the batch is not there to be claimed, else packed {absent, {{id, ms left, attempt, body}...}}: the
--   members that may run; the others (no time left, nobody waits) end here, and a batch that is left empty is closed. The
--   last `absent` bodies had no room: `bodies` has them.
-- include: prelude, protocol, wake, row, repaying, ending, owners, batch, retry_budget, same, followers
if other_protocol() then return other_protocol() end
local batch = load_batch(ARGV[2])
if not batch or batch.state ~= 'formed' then
  wake() -- a finish pushed no token because this id stood in line
  return false
end
call('HSET', P .. 'batch:' .. batch.id, 'state', 'running', 'worker', ARGV[3], 'token', ARGV[4])
batch.worker = ARGV[3]
lease(batch, tonumber(ARGV[5]))
local room = tonumber(ARGV[7])
local out, absent, gone_ms, attempt = {}, 0, tonumber(ARGV[6]), packed[batch.losses + 1]

-- bin_head[n]: a body may hold any bytes, and Lua's msgpack knows no bin.
local bin_head = setmetatable({}, {__index = function(known, n)
  known[n] = n < 65536 and struct.pack('>BI2', 0xc5, n) or struct.pack('>BI4', 0xc6, n)
  return known[n]
end})

each_member(batch, function(id, row, list)
  local left, body, code = row[DEADLINE] - now, room > 0 and row[WHO] or '', nil
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
    out[#out + 1] = '\148' .. text_head[#id] .. id .. packed[left] .. attempt .. bin_head[#body] .. body
    if room <= 0 then absent = absent + 1 end
    room = room - #body
    return room <= 0 and 'state' or nil -- once there is no room, bodies are not even read
  end
  close(id, row, 'failed', code, batch, NO_RUN)
  call('LREM', list, 1, id)
end, 'body')
flush()
if #out == 0 then drop_batch(batch) end
wake_free()
return '\146' .. packed[absent] .. array(out)
