#!lua flags=no-writes
-- bodies: return the bodies that did not fit into the reply of `claim`.
-- KEYS[1] leases. ARGV: packed_ids {request id...}, max_bytes after which the reply ends.
-- Returns the bodies of the first of them, at least one, in order; '' for a request that has ended meanwhile.
-- include: prelude
local bodies, bytes_left = {}, max_bytes
for i, id in ipairs(cmsgpack.unpack(packed_ids)) do
  if bytes_left <= 0 then break end
  local body = redis.pcall('HGET', P .. 'request:' .. id, 'body')
  bodies[i] = type(body) == 'string' and body or ''
  bytes_left = bytes_left - #bodies[i]
end
return bodies
