#!lua flags=allow-oom
-- adopt: a gateway sends again the results that it delivered recently, because Redis may have lost them.
-- A request that is still open ends with the delivered result, without a message and without a stored reply. A request that
-- ended with another result than its client got is revoked.
-- KEYS[1] leases. ARGV: 1 prefix, 2 packed {{id, state, code, told}...}, 3 their audit records, as one outbox entry.
-- Returns how many of them were still open.
-- include: prelude, row, repaying, revoking, ending, batch, retry_budget, same, followers
local count = 0
for _, told in ipairs(cmsgpack.unpack(ARGV[2])) do
  local id = told[1]
  local row = read(id)
  if open(row) then
    if row[STATE] == 'processing' then leave(id, row) end
    local p = party(row)
    settle(id, told[2], told[3])
    if p.keep_ms then pcall(keep_replay, id, p.customer, p.keep_ms, row[DEADLINE]) end
    repay(id, row, p, told[2], told[3], -1)
    if p.shared and row[STATE] ~= 'riding' then ridden[#ridden + 1] = {id, row, told[2], told[3], NO_BATCH, false} end
    count = count + 1
  elseif row[STATE] and told[4] and told[2] == 'failed' then
    revoke(id, row, told[3], 0)
  end
end
repay_all()
flush()
redis.call('LPUSH', P .. 'outbox', ARGV[3])
return count
