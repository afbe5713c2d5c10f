-- enqueue: Idempotency-Keys, and how accepted submissions are stored (needs row, backlogs, submissions, retry_budget, and the
-- arguments of admit). `idem:<value>` names the request of an Idempotency-Key.
local keys_claimed = {}

-- find_by_key(value, fingerprint) -> 'replayed' or 'in_progress' and the id of the request with this key, or 'reused'; nil if
-- the key may be claimed: it is new or expired, or its request failed for a reason other than its input.
local function find_by_key(value, fingerprint)
  if value == '' then return nil end
  local row = call('HMGET', P .. 'idem:' .. value, 'id', 'fp')
  if not row[1] then return nil end
  if row[2] ~= fingerprint then return 'reused' end
  local key = P .. 'request:' .. row[1]
  local request = redis.pcall('HMGET', key, 'state', 'code') -- no fields if the key has a wrong type
  local in_progress = request[1] == 'queued' or request[1] == 'processing' or request[1] == 'riding'
  if in_progress then return 'in_progress', row[1] end
  -- A request that ended in direct mode is known to be completed, but its reply is not in Redis.
  local has_reply = is_replayable(request[1], request[2]) and call('HEXISTS', key, 'reply') == 1
  if has_reply then return 'replayed', row[1] end
end

-- claim_key(customer, value, fingerprint, id, life_ms, again): stores the id under the key; row and key live equally long, and at
-- least `life_ms`. A resubmitted request does not replace a request that claimed the key after Redis lost its data.
local function claim_key(customer, value, fingerprint, id, life_ms, again)
  local key, row, ms = P .. 'idem:' .. value, P .. 'request:' .. id, math.max(replay_ms, life_ms)
  call('HSET', row, 'idem', value)
  extend_ttl(row, ms)
  keys_claimed[customer] = (keys_claimed[customer] or 0) + 1
  if again and call('EXISTS', key) == 1 then return end
  call('HSET', key, 'id', id, 'fp', fingerprint)
  call('PEXPIRE', key, ms)
end

-- evict(list, count): evicts up to `count` of the oldest replies of one customer that are over its limits or have expired.
local function evict(list, count)
  local newest = call('LINDEX', list, -1)
  local total, rows = newest and cumulative_cost(newest) or 0, newest and call('LLEN', list) or 0
  while rows > 0 and count > 0 do
    local entry = call('LINDEX', list, 0)
    local cumulative, cost, expires_at, normal_expiry, id, value = string.match(entry, '^(%d+) (%d+) (%d+) (%d+) (%S+) (.*)$')
    if cumulative and rows <= replay_rows and total - cumulative + cost <= replay_bytes and tonumber(expires_at) > now then
      return
    end
    call('LPOP', list)
    rows, count = rows - 1, count - 1
    if cumulative then
      local stored_until = tonumber(redis.pcall('HGET', P .. 'request:' .. id, 'stored')) -- a job whose result is in PostgreSQL
      shorten_ttl(id, value, math.min(normal_expiry, stored_until or normal_expiry) - now)
    end
  end
end

-- evict_replays(): for the customers that claimed keys in this call. Only requests that have ended are in their lists.
local function evict_replays()
  local MAX_EVICTIONS = 64 -- per call, plus two for each key that it stores: lowered limits take some calls to apply
  for customer, count in pairs(keys_claimed) do evict(P .. 'replays:' .. customer, MAX_EVICTIONS + 2 * count) end
end

-- store(g, o, ...) for each accepted submission of group g; then enqueue() queues and records all of them at once. Deadlines
-- count from `arrived_at`, when the gateway sent the call. The state is 'queued' unless another one is given.
local accepted, fresh = {}, 0
local ACCEPTED_SIZE = 4 -- of the fields of each, which are packed for the audit
local LISTED = {listed = true, ['listed+'] = true} -- of `charged`: the cost of each bucket is a field

-- who_field(g, charged, marks) -> the field `who` of a group's requests; `marks` is what only some of them have.
local function who_field(g, charged, marks)
  local kind = charged .. marks
  if g.who[kind] then return g.who[kind] end
  local tail = string.find(charged, 'nothing', 1, true) and '-' or (g.key and g.key_id or '-') .. g.quotas.windows
  g.who[kind] = table.concat({gateway_id, g.customer_id, g.tier.name, charged, tail}, ' ') .. marks
  return g.who[kind]
end

-- add_to_queue(g, id): the tier queue has a limited number of places; then, ids are added to the backlogs of their customers.
local function add_to_queue(g, id)
  local t = g.tier
  local ids = t.ids
  if t.waiting > 0 or t.queued + #ids >= t.places and not backlogs.denied then
    if g.flow then g.flow.length = g.flow.length + 1 end
    t.waiting, ids = t.waiting + 1, t.backlogs[g.customer_id]
    if not ids then
      ids = {weight = g.customer.weight}
      t.backlogs[g.customer_id] = ids
    end
    if g.key_weight > 0 then
      local backlog = ids
      backlog.keys = backlog.keys or {}
      ids = backlog.keys[g.key_id] or {weight = g.key_weight}
      backlog.keys[g.key_id] = ids
    end
  end
  ids[#ids + 1] = id
end

-- The columns of `env` are mostly the same for the next submission.
local columns, columns_total_ms, columns_queue_ms, columns_tokens

local function store(g, o, key, body, charged, state)
  local id, total_ms, queue_ms, tokens = submissions[o + ID], submissions[o + TOTAL_MS], submissions[o + QUEUE_MS], submissions[o + TOKENS]
  local rare, trace, LARGE_BYTES = submissions[o + RARE], submissions[o + TRACE], 32768 -- 256 kB add about 4 ms to a batch
  if total_ms ~= columns_total_ms or queue_ms ~= columns_queue_ms or tokens ~= columns_tokens then
    columns_total_ms, columns_queue_ms, columns_tokens = total_ms, queue_ms, tokens
    columns = time_column[now] .. time_column[arrived_at + total_ms] .. time_column[arrived_at + queue_ms] .. token_column[tokens]
  end
  local who, has_key, ms = g.who[charged], rare and rare[1] ~= '', total_ms + keep_ms
  if has_key or not who or #body > LARGE_BYTES then
    who = who_field(g, charged, (#body > LARGE_BYTES and ' large' or '') .. (has_key and ' idem ' .. decimal[keep_ms] or ''))
  end
  call('HSET', key, 'state', state or 'queued', 'env', columns .. submissions[o + NONCE], 'who', who, 'body', body)
  if LISTED[charged] then call('HSET', key, 'charged', charged_field(g, o)) end
  call('PEXPIRE', key, decimal[ms])
  if has_key then
    if g.home > 0 then g.customer.keep_ms = replay_ms end -- as long as another cell has to be asked for the key
    claim_key(g.customer_id, rare[1], rare[2], id, ms, rare[3])
  end
  if not state or state == 'queued' then
    add_to_queue(g, id)
    if not (rare and rare[3]) then fresh = fresh + 1 end
  end
  accepted[#accepted + 1] = str_header[#id] .. id .. g.number .. packed[submissions[o + BYTES]] .. str_header[#trace] .. trace
end

-- enqueue() -> whether any submission was accepted.
local function enqueue()
  if #accepted == 0 then return false end
  for name, t in pairs(tiers) do
    if t.ids[1] then call('LPUSH', P .. 'queue:' .. name, unpack(t.ids)) end
    backlogs.push(name, t.backlogs)
  end
  call('LPUSH', P .. 'outbox', '\145\149\161c' .. packed[gateway_id] .. packed_groups ..
    pack_array(accepted, ACCEPTED_SIZE) .. packed_endpoints)
  if fresh > 0 then deposit(fresh) end
  return true
end
