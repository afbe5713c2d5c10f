-- prelude: what every script starts with. ARGV[1] is the pool's key prefix; the other arguments are locals of their names, which
-- scheduler/redis_client/scripts.py writes before the next include. The clock is Redis TIME, in ms. T is the hash tag of a cluster,
-- with which the names of keys that all pools share begin; '' on other servers.
local call, try, P = redis.call, redis.pcall, ARGV[1]
local T = string.match(P, '^{cell:[^}]*}:') or ''
-- While single keys of the slot are moved to another server, a missing key raises an error; here, before anything is written.
if T ~= '' then call('EXISTS', T .. 'moving') end
local time = call('TIME')
local now_us = time[1] * 1000000 + time[2]
local now = math.floor(now_us / 1000)

-- packed[v]: v as msgpack; each value is packed once per call.
local packed = setmetatable({}, {__index = function(memo, v)
  local bytes = cmsgpack.pack(v)
  if v == v then memo[v] = bytes end
  return bytes
end})

-- decimal[n]: a whole number as text. Redis formats a number argument again for each command, which is slower than this table.
local decimal = setmetatable({}, {__index = function(memo, n)
  memo[n] = string.format('%.0f', n)
  return memo[n]
end})

-- str_header[n]: the msgpack header of a string of n bytes. For strings that differ each time, which `packed` would only collect.
local str_header = setmetatable({}, {__index = function(memo, n)
  local header
  if n < 32 then header = string.char(0xa0 + n)
  elseif n < 256 then header = string.char(0xd9, n)
  elseif n < 65536 then header = struct.pack('>BI2', 0xda, n)
  else header = struct.pack('>BI4', 0xdb, n) end
  memo[n] = header
  return header
end})

-- is_wrong_type(err): true if a key has a wrong type; raises any other error.
local function is_wrong_type(err)
  return string.find(err, 'WRONGTYPE', 1, true) and true or error(err)
end

-- extend_ttl(key, ms, slack): sets the lifetime of a key to `ms`, and a part `slack` more, unless it is longer than `ms` already. With
-- SLACK, a key that is used all the time is not extended by each call.
local SLACK = 0.02
local function extend_ttl(key, ms, slack)
  if call('PTTL', key) < ms then call('PEXPIRE', key, math.ceil(ms * (1 + (slack or 0)))) end
end

-- pack_array(parts, size): a msgpack array of parts that are packed already, each of `size` elements (1 without it).
local function pack_array(parts, size)
  local n, header = #parts * (size or 1), nil
  if n < 16 then header = string.char(0x90 + n)
  else header = n < 65536 and struct.pack('>BI2', 0xdc, n) or struct.pack('>BI4', 0xdd, n) end
  return header .. table.concat(parts)
end
