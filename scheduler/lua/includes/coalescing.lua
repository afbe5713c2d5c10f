-- coalescing: equal submissions share one run or get a cached reply (needs submissions, charge, enqueue, row,
-- coalescing_keys, and the argument keep_ms). Each has its own row, audit record and lease; only the primary is in a queue. With a cached reply, a
-- submission ends when it is admitted, and the reply is part of the verdict, not a message.
local cached_outcomes = {}

-- finish_from_cache(g, o, key, charged, answer) -> the reply of a submission that completes at once. It pays the reply's tokens.
local function finish_from_cache(g, o, key, charged, answer)
  local used, bytes, tail = cmsgpack.unpack(answer)
  local id, nonce, n = submissions[o + ID], submissions[o + NONCE], #cached_outcomes
  local reply = '\220\0\17' .. str_header[#id] .. id .. packed[g.customer_id] .. str_header[#nonce] .. nonce ..
    cmsgpack.pack('completed', '', 0, -1, '', 0, '') .. tail .. packed.cache
  call('HSET', key, 'ended', string.format('%.0f', now), 'reply', reply)
  if submissions[o + RARE][1] ~= '' then
    record_replay(id, g.customer_id, keep_ms, arrived_at + submissions[o + TOTAL_MS], #reply)
  end
  if charged ~= 'nothing' then
    settle_charge(g, o, used)
    if g.quotas.metered then
      local text = metered.field(g.customer, g.quotas, submissions[o + TOKENS], g.meter)
      call('HSET', key, 'charged', metered.settle(text, true, 0, used > 0 and used or nil, function() end))
    end
  end
  for i, v in ipairs({id, 0, -1, -1, used, bytes}) do cached_outcomes[n + i] = v end
  return reply
end

-- record_cached_outcomes(): writes the audit record of all submissions that completed from the cache.
local function record_cached_outcomes()
  if #cached_outcomes == 0 then return end
  call('LPUSH', P .. 'outbox', '\145\154\161f' .. cmsgpack.pack('completed', '', now, '', 0, '', 0, cached_outcomes, 'cache'))
end

-- match(g, rare) -> 'cached' and the cached reply; 'follow' or 'replace' and the id of the primary; nil if the submission runs by
-- itself. A primary after its deadline has no followers any more, whatever its state.
local function match(g, rare)
  if not (rare and rare[5]) then return nil end
  local stored = call('HMGET', P .. 'same:' .. rare[5], 'answer', 'leader')
  if stored[1] then return 'cached', stored[1] end
  local row, is_damaged = {}, false
  if stored[2] then row, is_damaged = peek_row(stored[2]) end
  if is_damaged or row[STATE] ~= 'queued' and row[STATE] ~= 'processing' or now >= row[DEADLINE] then return nil end
  if row[STATE] == 'processing' then return 'follow', stored[2] end
  for _, name in ipairs(g.tier.ahead) do
    if name == account_of(row).tier then return 'follow', stored[2] end
  end
  return 'replace', stored[2]
end

-- needs_no_run(g, rare): whether a submission needs neither GPU time nor a place in the queue.
local function needs_no_run(g, rare)
  local how = match(g, rare)
  return how == 'cached' or how == 'follow'
end

-- follow(primary, id): the list of followers lives as long as the row of each of them.
local function follow(primary, id)
  call('RPUSH', P .. 'riders:' .. primary, id)
  extend_ttl(P .. 'riders:' .. primary, call('PTTL', P .. 'request:' .. id))
end

-- replace_primary(old, id): the primary is queued in a lower tier than the new request, which replaces it: the old primary and
-- its followers follow the new one. Its id stays in the tier queue as a dead entry.
local function replace_primary(old, id)
  if call('EXISTS', P .. 'riders:' .. old) == 1 then call('RENAME', P .. 'riders:' .. old, P .. 'riders:' .. id) end
  call('HSET', P .. 'request:' .. old, 'state', 'riding', 'lifted', 1)
  follow(id, old)
end

-- store_coalesced(g, o, ...) -> the reply if it ended at once: stores a submission with a coalescing key.
local function store_coalesced(g, o, key, body, charged)
  local rare, id, total_ms = submissions[o + RARE], submissions[o + ID], submissions[o + TOTAL_MS]
  local how, value = match(g, rare)
  store(g, o, key, body, charged .. '+',
    how == 'cached' and 'completed' or how == 'follow' and 'riding' or 'queued')
  if how == 'cached' then return finish_from_cache(g, o, key, charged, value) end
  call('HSET', key, 'same', rare[5] .. ' ' .. string.format('%.0f', rare[6]) .. ' ' .. rare[7])
  add_lease(g.customer, id, arrived_at + total_ms)
  if how == 'follow' then return follow(value, id) end
  depth[g.tier.name] = depth[g.tier.name] + 1
  set_primary(rare[5], id, arrived_at + total_ms - now)
  if how == 'replace' then replace_primary(value, id) end
end

-- accept(g, o, key, body, charged) -> the reply if the submission ended at once.
local function accept(g, o, key, body, charged)
  local rare = submissions[o + RARE]
  if rare and rare[5] then return store_coalesced(g, o, key, body, charged) end
  store(g, o, key, body, charged)
  add_lease(g.customer, submissions[o + ID], arrived_at + submissions[o + TOTAL_MS])
  depth[g.tier.name] = depth[g.tier.name] + 1
end
