#!lua flags=allow-oom
-- limits_leave: the limits of customers leave this cell. Returns what is left of them; from now on admit rejects their requests here.
-- What is left stays, until it expires: another gateway that asks gets the same.
-- KEYS[1] leases. ARGV: version of the catalog by which their home is another cell; packed_customers {{customer id,
--   {key id...}, {value of an Idempotency-Key...}}...}.
-- Returns for each customer, packed: {version of the newer catalog by which the limits are here or have left, whether they are
--   here}, or {0, whether they left just now, ms that the hash lives, us since it was written (false: nothing is known), its
--   fields, {id, ms, id, ms...} of its open requests, {{us, fields} or false...} of the keys, whether each Idempotency-Key has a
--   request or its reply here}. All times are durations by this server's clock.
-- include: prelude, row
local FRESH_MS, MARK_MS, MOST_OPEN = 10000, 900000, 2000 -- a gateway uses an old catalog for at most 15 minutes
local replies = {}

local function hash(key)
  local found, fields = {}, call('HGETALL', key)
  for i = 1, #fields, 2 do found[fields[i]] = fields[i + 1] end
  return found
end

-- open_requests(id): those that were admitted in this cell. The others (`<cell>/<id>`) are returned by their own cell.
local function open_requests(id)
  local open, found = {}, call('ZRANGEBYSCORE', T .. 'rl:leases:' .. id, '(' .. now, '+inf', 'WITHSCORES', 'LIMIT', 0, MOST_OPEN)
  for i = 1, #found, 2 do
    if not string.find(found[i], '/', 1, true) then open[#open + 1], open[#open + 2] = found[i], found[i + 1] - now end
  end
  return open
end

local function key_state(id)
  local row = call('HMGET', T .. 'rl:key:' .. id, 'at', 'tokens', 'rate')
  return row[1] and row[2] and {now_us - row[1], {tokens = row[2], rate = row[3]}} or false
end

-- is_known(value): as find_by_key of admit, which decides.
local function is_known(value)
  local id = call('HGET', P .. 'idem:' .. value, 'id')
  local request = id and redis.pcall('HMGET', P .. 'request:' .. id, 'state', 'code') or {}
  if request[1] == 'queued' or request[1] == 'processing' or request[1] == 'riding' then return true end
  return is_replayable(request[1], request[2]) and call('HEXISTS', P .. 'request:' .. id, 'reply') == 1 or false
end

local function leave(id, key_ids, values)
  local key = T .. 'rl:customer:' .. id
  local row, keys, known = hash(key), {}, {}
  local state, decided, at = string.match(row.home or '', '^(%a+) (%d+) (%d+)$')
  decided = tonumber(decided)
  if decided and (decided > version or decided == version and state == 'here') then return {decided, state == 'here'} end
  local left_at = state == 'left' and tonumber(at) or now
  call('HSET', key, 'home', string.format('left %.0f %.0f', version, left_at))
  extend_ttl(key, MARK_MS)
  for i, key_id in ipairs(key_ids) do keys[i] = key_state(key_id) end
  for i, value in ipairs(values) do known[i] = is_known(value) end
  local age = row.at and now_us - row.at or false
  row.at, row.home = nil, nil
  return {0, math.abs(now - left_at) < FRESH_MS, call('PTTL', key), age, row, open_requests(id), keys, known}
end

for i, each in ipairs(cmsgpack.unpack(packed_customers)) do replies[i] = cmsgpack.pack(leave(each[1], each[2], each[3])) end
return replies
