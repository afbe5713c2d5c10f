-- entering: what an accepted submission leaves in Redis (needs prelude, idempotency and retry_budget).
-- store(s, body, gateway, keep_ms, came, paid) for each, then enter(), which queues and notes them all at once. The time of a
-- request runs from when its gateway called, which `came` says.
local pushes, accepted, fresh = {}, {}, 0

local function store(s, body, gateway, keep_ms, came, paid)
  local row, ids = P .. 'request:' .. s[1], pushes[s[2]] or {}
  pushes[s[2]], ids[#ids + 1] = ids, s[1]
  redis.call('HSET', row, 'state', 'queued', 'tier', s[2], 'gw', gateway, 'cust', s[3], 'nonce', s[5],
    'at', now, 'dl', came + s[8], 'qdl', came + s[9], 'body', body, 'paid', paid)
  redis.call('PEXPIRE', row, s[8] + keep_ms)
  if s[11] ~= '' then hold(s[11], s[12], s[1], s[13]) end
  accepted[#accepted + 1] = {'a', s[1], s[3], s[4], s[2], s[6], gateway, s[7], s[10]}
  if not s[13] then fresh = fresh + 1 end
end

-- enter() -> whether there was any.
local function enter()
  if #accepted == 0 then return false end
  for tier, ids in pairs(pushes) do redis.call('LPUSH', P .. 'queue:' .. tier, unpack(ids)) end
  redis.call('LPUSH', P .. 'outbox', cmsgpack.pack(accepted))
  if fresh > 0 then deposit(fresh) end
  return true
end
