-- followers: requests that wait for the run of an equal one, their primary, and how they end when it ends (needs prelude, row,
-- refund, finalize, batch, retry_budget and coalescing_keys). `riders:<primary>` lists their ids, oldest first. One call
-- processes a limited number of them; `sharing` names the primaries with remaining ones.
-- Followers get a result that another run would repeat. Any other end concerns the primary only, and the next follower runs,
-- with the primary's losses, so that an input that kills workers has no more attempts than one request.
local visits_left = 64

-- each_follower(primary, visit) -> whether there may be more: visit(id, row) for those that still wait, until it returns true.
local function each_follower(primary, visit)
  while visits_left > 0 do
    local id = call('LPOP', P .. 'riders:' .. primary)
    if not id then return false end
    visits_left = visits_left - 1
    local row = read_row(id)
    if row[STATE] == 'riding' and visit(id, row) then return false end
  end
  return call('EXISTS', P .. 'riders:' .. primary) == 1
end

-- finalize_followers(primary, result) -> whether any are left: they end with the packed result, without a run of their own.
local function finalize_followers(primary, result)
  local state, code, id, size, worker, used, bytes, tail, cost = cmsgpack.unpack(result)
  local batch, run = {id = id, size = size, worker = worker, losses = 0, served_from = 'collapsed'},
    {-1, used, bytes, tail, cost}
  return each_follower(primary, function(follower, row) return not finalize(follower, row, state, code, batch, run) end)
end

-- leave_backlog(tier, customer, id): removes an id from the list of its customer, or from that of its key if that has a weight.
local function leave_backlog(tier, customer, id)
  local node = tier .. ':' .. customer
  local removed = call('LREM', P .. 'backlog:' .. node, -1, id)
  for _, key in ipairs(removed == 0 and call('ZRANGE', P .. 'backlogs:' .. node, 0, -1) or {}) do
    local of_key = call('LREM', P .. 'backlog:' .. node .. ':' .. key, -1, id)
    backlogs.remove(node, of_key)
    removed = removed + of_key
  end
  backlogs.remove(tier, removed)
end

-- queue_follower(id, row, losses): a follower runs in place of its primary, first in its tier; its queue timeout no longer
-- applies. With losses it is a batch by itself, because it must not join new requests.
local function queue_follower(id, row, losses)
  local PROMOTED_LEASE_MS, PROMOTED_KEEP_MS = 600, 60000
  local key, tier, env = P .. 'request:' .. id, account_of(row).tier, row[ENV]
  local batch = {id = sub(id, 5), losses = losses, last = row[DEADLINE]}
  -- A former primary may still be in its tier queue: with two entries it would run twice.
  if call('HDEL', key, 'lifted') == 1 and call('LREM', P .. 'queue:' .. tier, -1, id) == 0 then
    leave_backlog(tier, account_of(row).customer, id)
  end
  call('HSET', key, 'state', 'queued', 'env', sub(env, 1, 28) .. sub(env, 15, 27) .. sub(env, 42))
  if losses == 0 then call('RPUSH', P .. 'queue:' .. tier, id)
  else
    call('HSET', key, 'state', 'processing', 'batch', batch.id, 'losses', losses)
    call('LPUSH', P .. 'inflight:' .. tier .. ':' .. batch.id, id)
    batch.tiers = {tier}
    push_first(batch, 1, PROMOTED_LEASE_MS, PROMOTED_KEEP_MS)
  end
  if call('LLEN', P .. 'wake') == 0 then call('LPUSH', P .. 'wake', 1) end
end

-- promote_follower(primary, hash, losses) -> whether followers are left to process: the oldest with time left becomes the primary.
local function promote_follower(primary, hash, losses)
  return each_follower(primary, function(id, row)
    if now >= row[DEADLINE] then return not finalize(id, row, 'failed', 'deadline_exceeded', NO_BATCH, NO_RUN) end
    queue_follower(id, row, losses)
    local list = P .. 'riders:' .. primary
    if call('EXISTS', list) == 1 then call('RENAME', list, P .. 'riders:' .. id) end
    if call('EXISTS', P .. 'same:' .. hash) == 0 then set_primary(hash, id, row[DEADLINE] - now) end
    return true
  end)
end

local followers_left = false
local REPEATABLE_FAILURES = {poison_request = true, invalid_output = true, invalid_request = true,
  context_length_exceeded = true, request_too_large = true}

-- shared_result(...) -> the packed result of all followers, or nil if one of them runs.
local function shared_result(row, state, code, batch, run, losses)
  if run and (state == 'completed' or REPEATABLE_FAILURES[code] or row.is_dead_letter) then
    return cmsgpack.pack(state, code, batch.id, batch.size, batch.worker, run[USED], run[BYTES], without_gpu_ms(run[TAIL]),
      run[COST])
  end
  if losses > 0 and withdraw(1) == 0 then -- it would be a retry, and the pool has no retry budget left
    return cmsgpack.pack('failed', 'worker_lost', '', 0, '', 0, 0, NO_RUN[TAIL])
  end
end

-- end_primary(...): for a coalesced request that was finalized; `run` is false if its output is not in Redis.
local function end_primary(id, row, state, code, batch, run)
  local SHARING_KEEP_MS = 60000
  local stored = redis.pcall('HMGET', P .. 'request:' .. id, 'same', 'losses')
  if stored.err then return end
  local hash, ttl_ms, version = string.match(stored[1] or '', '^(%S+) (%d+) (.*)$')
  if not hash then return end
  local was_primary, losses, has_more = clear_primary(hash, id), tonumber(stored[2]) or 0, nil
  if was_primary and run and state == 'completed' then
    cache_reply(hash, tonumber(ttl_ms), version, run[USED], run[BYTES], run[TAIL])
  end
  if call('EXISTS', P .. 'riders:' .. id) == 0 then return end
  local result = shared_result(row, state, code, batch, run, losses)
  if result then has_more = finalize_followers(id, result) else has_more = promote_follower(id, hash, losses) end
  if not has_more then return end
  if result then call('HSET', P .. 'request:' .. id, 'told', result) end
  call('ZADD', P .. 'sharing', now, id)
  -- As long as any follower lives, because the process that ends them may be unavailable for some time.
  local keep_ms = math.max(SHARING_KEEP_MS, call('PTTL', P .. 'riders:' .. id))
  extend_ttl(P .. 'sharing', keep_ms)
  extend_ttl(P .. 'request:' .. id, keep_ms)
  followers_left = true
end

local flush_results = flush
local function flush()
  finalize_damaged()
  for _, primary in ipairs(ended_primaries) do end_primary(unpack(primary)) end
  flush_results()
end
