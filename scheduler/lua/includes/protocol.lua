-- protocol: the version of all that is stored in Redis, "<major>.<minor>" (needs prelude). Another major is of rows that this
-- code cannot read: scripts that let work in, hand it out or look it over then refuse to, each time with one sentence.
-- A user of Redis that may not read the key (an ACL of before) is not refused.
local PROTOCOL = '1.0'
local stored = redis.pcall('GET', 'protocol')

local function other_protocol()
  if type(stored) ~= 'string' or string.match(stored, '^%d+') == string.match(PROTOCOL, '^%d+') then return nil end
  return redis.error_reply('PROTOCOL Redis holds data of protocol ' .. string.sub(stored, 1, 16) .. ' and this process speaks ' ..
    PROTOCOL .. ': run roles of one version of Tierlane on it.')
end
