#!lua
-- allot: claim this cell for one allotter, and set the parts of their limits that customers of several cells may use here. Only
-- the allotter with the claim can write, and its calls only in their order, so that a late one changes nothing.
-- KEYS[1] leases. ARGV: allotter_id; its epoch (0: only read); call_number; ends_at: TIME in ms until which the parts hold;
--   packed_orders {{customer, {{kind, rate, size}...}, false (only read), {} (remove) or {rates, concurrency, quotas} as
--   in share, {{quota, amount, window, grant, others}...}, time zone as in quota or false}...}; packed_kinds of buckets as in customer.
-- Returns packed {accepted, TIME in ms, epoch of the claim, ms that it holds, customers with parts here, {{stored parts or false,
--   ms that they hold, open requests, requests so far, {{window, spent, grant}...}} of each customer}}. Buckets of a customer
--   that is new here are empty.
-- include: prelude, ratelimit/bucket, ratelimit/quota, ratelimit/share
local CLAIM_MS, KEEP_MS, INDEX = 3000, 604800000, T .. 'rl:shared'
local kinds = cmsgpack.unpack(packed_kinds)

-- may_write(claim) -> whether the call is accepted, and ms that the claim of another allotter holds.
local function may_write(claim)
  local known, held_ms = tonumber(claim[2]) or 0, (tonumber(claim[4]) or 0) - now
  if held_ms < 0 or held_ms > CLAIM_MS then held_ms = 0 end
  local is_late = ends_at ~= 0 and (ends_at <= now or ends_at > now + share.LONGEST_MS)
  if claim[1] == allotter_id then return epoch >= known and call_number > tonumber(claim[3]) and not is_late, 0 end
  return epoch > known and held_ms == 0 and not is_late, held_ms
end

-- set_buckets(key, limits, old, new): from here on the buckets have the part `new`. None has more than it would have with `old`.
local function set_buckets(key, limits, old, new)
  local fields, updated_at = {'at', string.format('%.0f', now_us)}, tonumber(call('HGET', key, 'at'))
  for _, b in ipairs(limits) do
    local kind, n = kinds[b[1]], #fields
    local row = call('HMGET', key, kind[2], kind[3])
    local tokens, old_rate = tonumber(row[1]), tonumber(row[2])
    if old and tokens and updated_at then
      local rate = share.of(b[2], old) / kind[4]
      tokens = refilled(tokens, updated_at, old_rate and old_rate / kind[4], rate, share.of(b[3], old))
    else tokens = math.min(0, tokens or 0) end
    fields[n + 1], fields[n + 2] = kind[2], string.format('%.9f', math.min(tokens, share.of(b[3], new)))
    fields[n + 3], fields[n + 4] = kind[3], share.of(b[2], new)
  end
  call('HSET', key, unpack(fields))
end

-- set_quota(key, q, stored, mode, zone) -> {window, spent, grant}; `mode` is 'read', 'set' or 'remove'. The only cell that keeps a part of
-- a quota counts what it was not granted as spent when the quota is not shared any more.
local function set_quota(key, q, stored, mode, zone)
  local row = call('HMGET', key, 'q:' .. q[1], 'g:' .. q[1])
  local window_number, window_ends_at, spent = window(q[1], zone, row[1])
  local grant, others = share.granted(row[2], window_number, q[2], stored and stored[3], spent)
  if mode == 'set' then
    if q[3] == window_number then grant, others = math.max(spent, q[4]), q[5] == 1 end
    call('HSET', key, 'g:' .. q[1], string.format('%.0f %.0f %d', window_number, grant, others and 1 or 0))
  elseif mode == 'remove' then
    if stored[3] > 0 then spent = spent + math.max(0, q[2] - grant) end
    call('HSET', key, 'q:' .. q[1], string.format('%.0f %.0f', window_number, spent))
    call('HDEL', key, 'g:' .. q[1])
  end
  if mode ~= 'read' then extend_ttl(key, window_ends_at - now + 1000) end
  return {window_number, spent, grant}
end

-- process(entry): the orders for one customer. The field `shared` says that the quotas of this hash have only what this cell spent.
local function process(entry)
  local id, parts = entry[1], entry[3]
  local key, quotas = T .. 'rl:customer:' .. id, {}
  local row = call('HMGET', key, 'share', 'asked')
  local old, left_ms, stored = share.read(row[1])
  local mode = not parts and 'read' or #parts > 0 and 'set' or 'remove'
  if mode == 'set' or mode == 'remove' and old then
    set_buckets(key, entry[2], old and old[1], parts[1] or share.WHOLE)
    extend_ttl(key, MIN_TTL_MS)
  end
  for i, q in ipairs(entry[4]) do quotas[i] = set_quota(key, q, stored, mode == 'remove' and not old and 'read' or mode, entry[5]) end
  if mode == 'set' then
    call('HSET', key, 'share', string.format('%.0f %d %d %d', ends_at, parts[1], parts[2], parts[3]), 'shared', 1)
    call('SADD', INDEX, id)
    stored, left_ms = parts, ends_at - now
  elseif mode == 'remove' then
    if stored and stored[3] > 0 then call('HDEL', key, 'shared') end
    call('HDEL', key, 'share', 'asked')
    call('SREM', INDEX, id)
    stored = nil
  end
  return {stored or false, left_ms or 0, call('ZCOUNT', T .. 'rl:leases:' .. id, '(' .. now, '+inf'), tonumber(row[2]) or 0, quotas}
end

local claim, entries = call('HMGET', T .. 'allotter', 'id', 'epoch', 'call', 'until'), {}
local accepted, held_ms = may_write(claim)
if accepted then
  call('HSET', T .. 'allotter', 'id', allotter_id, 'epoch', epoch, 'call', call_number, 'until', decimal[now + CLAIM_MS])
  call('PEXPIRE', T .. 'allotter', KEEP_MS)
  for i, entry in ipairs(cmsgpack.unpack(packed_orders)) do entries[i] = process(entry) end
  call('PEXPIRE', INDEX, KEEP_MS)
end
return cmsgpack.pack({accepted, now, accepted and epoch or tonumber(claim[2]) or 0, held_ms, call('SMEMBERS', INDEX), entries})
