-- prelude: what every script starts with. ARGV[1] is the pool's key prefix; the clock is Redis TIME, in ms.
local P = ARGV[1]
local time = redis.call('TIME')
local now_us = time[1] * 1000000 + time[2]
local now = math.floor(now_us / 1000)

-- array(parts): a msgpack array made of parts that are packed already.
local function array(parts)
  local n = #parts
  local header = n < 16 and string.char(0x90 + n) or string.char(0xdc, math.floor(n / 256), n % 256)
  return header .. table.concat(parts)
end
