-- revoke: if a request ended in Redis with another result than the response that its client received, the response is
-- authoritative (needs prelude, row and refund).

-- revoke(id, row, code, used) -> the audit record, or nil if nothing changed. The client received the error `code`, but the
-- request ended otherwise: changes row, stored reply and charges to those of any request that ends with `code`. A reply that
-- was replayed for a later request with the same Idempotency-Key stays: the client received that one last.
local function revoke(id, row, code, used)
  local key = P .. 'request:' .. id
  local stored = call('HMGET', key, 'code', 'reply', 'replayed')
  if is_open(row) or not row[ENV] or not stored[2] or stored[3] or (stored[1] or '') == code then return end
  local reply, account = cmsgpack.unpack(stored[2]), account_of(row)
  if used <= 0 then reply[18] = nil end -- its cost is not charged
  refund_unmetered(id, row, account, row[STATE], stored[1] or '', reply[12], -1)
  refund(id, row, account, 'failed', code, used, reply[18])
  reply[4], reply[5], reply[12], reply[14], reply[15] = 'failed', code, used, '', 0
  call('HSET', key, 'state', 'failed', 'code', code, 'reply', cmsgpack.pack(reply))
  return {'e', id, 'failed', code, now, now - row[AT], reply[7], reply[11], reply[8], reply[9], reply[10], reply[6], used, 0,
    'queue', true, reply[17] or '', reply[18] or -1}
end
