#!lua flags=allow-oom
-- claim: a worker claims a ready batch: owner, fencing token, running lease, one attempt counted.
-- KEYS[1] leases. ARGV: 1 prefix, 2 batch id, 3 worker id, 4 token, 5 lease ms,
--   6 ms without a heartbeat after which a gateway is lost, 7 bytes of bodies after which the reply ends.
-- Returns nil if the batch cannot be claimed, else packed {absent, {{id, ms left, attempt, body}...}}: the requests to run.
--   Others (no time left, or their gateway is lost) end here, and a batch that becomes empty is closed. The last `absent`
--   requests have no body: `bodies` returns them.
-- include: prelude, protocol, wake, row, repaying, ending, owners, batch, retry_budget, same, followers
if other_protocol() then return other_protocol() end
local batch = load_batch(ARGV[2])
if not batch or batch.state ~= 'formed' then
  wake() -- a finish pushed no wake token because this id was in batch_queue
  return false
end
call('HSET', P .. 'batch:' .. batch.id, 'state', 'running', 'worker', ARGV[3], 'token', ARGV[4])
batch.worker = ARGV[3]
lease(batch, tonumber(ARGV[5]))
local room = tonumber(ARGV[7])
local out, absent, gone_ms, attempt = {}, 0, tonumber(ARGV[6]), packed[batch.losses + 1]

-- bin_head[n]: the header of n bytes; a body may contain any bytes, and Lua's msgpack has no bin type.
local bin_head = setmetatable({}, {__index = function(known, n)
  known[n] = n < 65536 and struct.pack('>BI2', 0xc5, n) or struct.pack('>BI4', 0xc6, n)
  return known[n]
end})

each_member(batch, function(id, row, list)
  local left, body, code = row[DEADLINE] - now, room > 0 and row[WHO] or '', nil
  if left <= 0 or now - row[AT] >= gone_ms then -- otherwise its owner need not be read
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
    return room <= 0 and 'state' or nil -- when the reply is full, bodies are not read any more
  end
  close(id, row, 'failed', code, batch, NO_RUN)
  call('LREM', list, 1, id)
end, 'body')
flush()
if #out == 0 then drop_batch(batch) end
wake_free()
return '\146' .. packed[absent] .. array(out)
