-- prelude: what every script starts with. ARGV[1] is the pool's key prefix; the clock is Redis TIME, in ms.
local call, P = redis.call, ARGV[1]
local time = call('TIME')
local now_us = time[1] * 1000000 + time[2]
local now = math.floor(now_us / 1000)

-- packed[v]: v as msgpack, each value packed once a call.
local packed = setmetatable({}, {__index = function(known, v)
  local bytes = cmsgpack.pack(v)
  if v == v then known[v] = bytes end
  return bytes
end})

-- decimal[n]: a whole number as text. Redis formats numbers anew for each command, which takes longer than finding a text.
local decimal = setmetatable({}, {__index = function(known, n)
  known[n] = string.format('%.0f', n)
  return known[n]
end})

-- text_head[n]: what msgpack puts before a text of n bytes. For texts that differ each time, where `packed` would only collect.
local text_head = setmetatable({}, {__index = function(known, n)
  local head
  if n < 32 then head = string.char(0xa0 + n)
  elseif n < 256 then head = string.char(0xd9, n)
  elseif n < 65536 then head = struct.pack('>BI2', 0xda, n)
  else head = struct.pack('>BI4', 0xdb, n) end
  known[n] = head
  return head
end})

-- of_wrong_type(err): true where a key holds another type than it should; any other error is raised.
local function of_wrong_type(err)
  return string.find(err, 'WRONGTYPE', 1, true) and true or error(err)
end

-- outlive(key, ms): the key has at least so long to live from now on; a longer time is left as it is.
local function outlive(key, ms)
  if call('PTTL', key) < ms then call('PEXPIRE', key, math.ceil(ms)) end
end

-- array(parts): a msgpack array made of parts that are packed already.
local function array(parts)
  local n = #parts
  local header = n < 16 and string.char(0x90 + n) or struct.pack('>BI2', 0xdc, n)
  return header .. table.concat(parts)
end
