-- protocol: the version of the stored data, "<major>.<minor>" (needs prelude). This code cannot read rows of another major
-- version: scripts that accept, assign or scan work then return an error. A Redis user that may not read the key (older ACL
-- rules) is not rejected.
local PROTOCOL = '1.0'
local stored_protocol = redis.pcall('GET', T .. 'protocol')

-- protocol_error() -> the error to return, or nil if the stored version is compatible.
local function protocol_error()
  if type(stored_protocol) ~= 'string' or string.match(stored_protocol, '^%d+') == string.match(PROTOCOL, '^%d+') then
    return nil
  end
  return redis.error_reply('PROTOCOL Redis holds data of protocol ' .. string.sub(stored_protocol, 1, 16) ..
    ' and this process uses ' .. PROTOCOL .. ': run roles of one version of Tierlane on it.')
end
