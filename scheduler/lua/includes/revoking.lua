-- revoking: the answer that a client was given decides over an end that was noted at the same moment and that nobody was
-- told (needs prelude, row and repaying).

-- charge_of(row, p, state, code, used): tokens that are charged for it now.
local function charge_of(row, p, state, code, used)
  if p.paid ~= 'all' then return 0 end
  local tokens = tokens_of(row)
  if state == 'completed' or delivered(state, code, used) then return used > 0 and math.min(used, MOST_USED * tokens) or tokens end
  return THEIRS[code] and tokens or 0
end

-- revoke(id, row, code, used) -> the audit's record of it, nil where nothing is to be done: the request ended otherwise,
-- but its client was told `code`. Its row and stored reply say so from now on, and what it was charged comes back as for
-- any request that ends so; `used` as in repay.
local function revoke(id, row, code, used)
  local key = P .. 'request:' .. id
  local known = call('HMGET', key, 'code', 'reply')
  if open(row) or not row[ENV] or not known[2] or (known[1] or '') == code then return end
  local reply, p, before = cmsgpack.unpack(known[2]), party(row), known[1] or ''
  local charged = charge_of(row, p, row[STATE], before, reply[12])
  if row[STATE] == 'completed' or THEIRS[before] then
    local b = repay(id, row, p, 'failed', code, used)
    if b and p.paid == 'all' then b.tokens = b.tokens - tokens_of(row) + charged end
  end
  reply[4], reply[5], reply[12], reply[14], reply[15] = 'failed', code, used, '', 0
  call('HSET', key, 'state', 'failed', 'code', code, 'reply', cmsgpack.pack(reply))
  return {'e', id, 'failed', code, now, now - row[AT], reply[7], reply[11], reply[8], reply[9], reply[10], reply[6], used, 0,
    'queue', true, reply[17] or ''}
end
