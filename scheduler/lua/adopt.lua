#!lua flags=allow-oom
-- adopt: a gateway sends again the results that it delivered recently, because Redis may have lost them.
-- A request that is still open ends with the delivered result, without a message and without a stored reply. A request that
-- ended with another result than its client received is revoked, unless its reply was replayed since: then that one counts.
-- KEYS[1] leases. ARGV: packed_results {{id, state, code, delivered, tokens, cost_ms or -1}...}, and their audit records, as one outbox entry.
-- Returns how many of them were still open.
-- include: prelude, slots, row, ratelimit/metered, refund, revoke, backlogs, settlement, finalize, batch, retry_budget, coalescing_keys, followers
local count, replayed = 0, {}
for _, result in ipairs(cmsgpack.unpack(packed_results)) do
  local id = result[1]
  local row = read_row(id)
  if is_open(row) then
    if row[STATE] == 'processing' then leave_batch(id, row) end
    local account = account_of(row)
    set_terminal(id, result[2], result[3])
    if account.keep_ms then pcall(record_replay, id, account.customer, account.keep_ms, row[DEADLINE]) end
    refund(id, row, account, result[2], result[3], result[5] or -1, (result[6] or -1) >= 0 and result[6] or nil)
    if account.coalesced and row[STATE] ~= 'riding' then
      ended_primaries[#ended_primaries + 1] = {id, row, result[2], result[3], NO_BATCH, false}
    end
    count = count + 1
  elseif row[STATE] and result[4] and result[2] == 'failed' then
    revoke(id, row, result[3], result[5] or 0)
    local stored = call('HMGET', P .. 'request:' .. id, 'replayed', 'code')
    if stored[1] and (stored[2] or '') ~= result[3] then replayed[id] = true end
  end
end
apply_refunds()
flush()
if next(replayed) then
  local kept = {}
  for _, record in ipairs(cmsgpack.unpack(records)) do
    if record[1] ~= 'e' or not replayed[record[2]] then kept[#kept + 1] = record end
  end
  records = cmsgpack.pack(kept)
end
call('LPUSH', P .. 'outbox', records)
return count
