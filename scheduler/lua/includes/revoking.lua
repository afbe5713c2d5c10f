-- revoking: the answer that a client was given decides over an end that was noted at the same moment and that nobody was
-- told (needs prelude, row and repaying).

-- charge_of(units, state, code, used): of so many that were charged at admission, those that are charged now, settled.
local function charge_of(units, state, code, used)
  if state == 'completed' or delivered(state, code, used) then return used > 0 and math.min(used, MOST_USED * units) or units end
  return THEIRS[code] and units or 0
end

-- revoke(id, row, code, used) -> the audit's record of it, nil where nothing is to be done: the request ended otherwise,
-- but its client was told `code`. Its row and stored reply say so from now on, and what it was charged comes back as for
-- any request that ends so; `used` as in repay.
local function revoke(id, row, code, used)
  local key = P .. 'request:' .. id
  local known = call('HMGET', key, 'code', 'reply')
  if open(row) or not row[ENV] or not known[2] or (known[1] or '') == code then return end
  local reply, p, before = cmsgpack.unpack(known[2]), party(row), known[1] or ''
  if row[STATE] == 'completed' or THEIRS[before] then
    local b = repay(id, row, p, 'failed', code, used)
    for _, cost in ipairs(b and costs_of(id, row, p) or NO_COSTS) do
      if cost[4] then give_back(b, cost, charge_of(cost[3], row[STATE], before, reply[12]) - cost[3]) end
    end
  end
  reply[4], reply[5], reply[12], reply[14], reply[15] = 'failed', code, used, '', 0
  call('HSET', key, 'state', 'failed', 'code', code, 'reply', cmsgpack.pack(reply))
  return {'e', id, 'failed', code, now, now - row[AT], reply[7], reply[11], reply[8], reply[9], reply[10], reply[6], used, 0,
    'queue', true, reply[17] or ''}
end
