-- revoke: if a request ended in Redis with another result than the response that its client received, the response is
-- authoritative (needs prelude, row and refund).

-- final_charge(units, state, code, used): of `units` charged at admission, those that stay charged, settled.
local function final_charge(units, state, code, used)
  if state == 'completed' or was_partly_delivered(state, used) then
    return used > 0 and math.min(used, metered.MOST_TOKENS) or units
  end
  return CLIENT_FAULTS[code] and not REFUSED[code] and units or 0
end

-- revoke(id, row, code, used) -> the audit record, or nil if nothing changed. The client received the error `code`, but the
-- request ended otherwise: changes row and stored reply to `code`, and refunds as for any request that ends with it. A reply that
-- was replayed for a later request with the same Idempotency-Key stays: the client received that one last.
local function revoke(id, row, code, used)
  local key = P .. 'request:' .. id
  local stored = call('HMGET', key, 'code', 'reply', 'replayed')
  if is_open(row) or not row[ENV] or not stored[2] or stored[3] or (stored[1] or '') == code then return end
  local reply, account, old_code = cmsgpack.unpack(stored[2]), account_of(row), stored[1] or ''
  if row[STATE] == 'completed' or CLIENT_FAULTS[old_code] then
    local total = refund(id, row, account, 'failed', code, used, nil, true)
    for _, cost in ipairs(total and bucket_costs(id, row, account) or NO_COSTS) do
      if cost[4] then add_units(total, cost[1], cost[2], final_charge(cost[3], row[STATE], old_code, reply[12]) - cost[3]) end
    end
  end
  reply[4], reply[5], reply[12], reply[14], reply[15] = 'failed', code, used, '', 0
  reply[18] = nil -- it is not charged
  call('HSET', key, 'state', 'failed', 'code', code, 'reply', cmsgpack.pack(reply))
  return {'e', id, 'failed', code, now, now - row[AT], reply[7], reply[11], reply[8], reply[9], reply[10], reply[6], used, 0,
    'queue', true, reply[17] or ''}
end
