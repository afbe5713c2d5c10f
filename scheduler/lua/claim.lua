#!lua flags=allow-oom
-- claim: a worker claims a ready batch: owner, fencing token, running lease, one attempt counted.
-- KEYS[1] leases. ARGV: batch_id, worker_id, token, lease_ms, gone_ms without a heartbeat after which a gateway is lost,
--   max_bytes of bodies after which the reply ends; of a worker with slots also: slot_count, and the free ones before this claim.
-- Returns nil if the batch cannot be claimed, else packed {absent, {{id, ms left, attempt, body}...}}: the requests to run. With
--   slots each has two more fields: its tier, and whether it was withdrawn before.
--   Others (no time left, or their gateway is lost) end here, and a batch that becomes empty is closed. The last `absent`
--   requests have no body: `bodies` returns them.
-- include: prelude, slots, protocol, wake, row, ratelimit/metered, refund, backlogs, settlement, finalize, owners, batch, retry_budget, coalescing_keys, followers
if protocol_error() then return protocol_error() end
local batch = load_batch(batch_id)
if not batch or batch.state ~= 'formed' then
  wake() -- a finish pushed no wake token because this id was in batch_queue
  return false
end
if batch.slots then slots.claimed(batch.id) end
call('HSET', P .. 'batch:' .. batch.id, 'state', 'running', 'worker', worker_id, 'token', token)
batch.worker = worker_id
lease(batch, lease_ms)
local bytes_left = max_bytes
local out, absent, attempt = {}, 0, packed[batch.losses + 1]

-- bin_header[n]: the header of n bytes; a body may contain any bytes, and Lua's msgpack has no bin type.
local bin_header = setmetatable({}, {__index = function(memo, n)
  memo[n] = n < 65536 and struct.pack('>BI2', 0xc5, n) or struct.pack('>BI4', 0xc6, n)
  return memo[n]
end})

each_member(batch, function(id, row, list)
  local ms_left, body, code = row[DEADLINE] - now, bytes_left > 0 and row[WHO] or '', nil
  if ms_left <= 0 or now - row[AT] >= gone_ms then -- otherwise its owner need not be read
    row[WHO] = call('HGET', P .. 'request:' .. id, 'who')
    if not account_of(row) then
      quarantine(id, row)
      call('LREM', list, 1, id)
      return
    end
    code = ms_left <= 0 and 'deadline_exceeded' or abandoned(row, gone_ms) and 'gateway_lost'
  end
  if not code then
    local member = str_header[#id] .. id .. packed[ms_left] .. attempt .. bin_header[#body] .. body
    if not free then out[#out + 1] = '\148' .. member
    else
      local was_withdrawn = call('HEXISTS', P .. 'request:' .. id, 'withdrawn') == 1
      out[#out + 1] = '\150' .. member .. packed[string.match(list, 'inflight:(.-):')] .. packed[was_withdrawn]
    end
    if bytes_left <= 0 then absent = absent + 1 end
    bytes_left = bytes_left - #body
    return bytes_left <= 0 and 'state' or nil -- when the reply is full, bodies are not read any more
  end
  finalize(id, row, 'failed', code, batch, NO_RUN)
  call('LREM', list, 1, id)
end, 'body')
flush()
if #out == 0 then delete_batch(batch) end
if free then
  slots.report(worker_id, free - #out, slot_count, -#out)
  if #out < batch.size then wake_for_slot() end
else wake_for_worker(#out == 0) end
return '\146' .. packed[absent] .. pack_array(out)
