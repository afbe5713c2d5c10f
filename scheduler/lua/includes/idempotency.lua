-- idempotency: what a client's Idempotency-Key leads to (needs prelude, row and replays). `idem:<value>` names the request
-- that has it. replay_ms, replay_rows, replay_bytes: how long answers are kept, and how much of them for one customer.
local replay_ms, replay_rows, replay_bytes, holders = tonumber(ARGV[12]), tonumber(ARGV[13]), tonumber(ARGV[14]), {}
local MOST_EVICTED = 64 -- a call, beside two for each key that it stores: limits that were lowered take some calls to hold

-- held(value, fingerprint) -> replayed or in_progress (and which request has the key), or reused; nil where a request may
-- have it: it is new, or the one that had it is forgotten, or failed in a way that says nothing about its input.
local function held(value, fingerprint)
  if value == '' then return nil end
  local row = call('HMGET', P .. 'idem:' .. value, 'id', 'fp')
  if not row[1] then return nil end
  if row[2] ~= fingerprint then return 'reused' end
  local key = P .. 'request:' .. row[1]
  local request = redis.pcall('HMGET', key, 'state', 'code') -- without fields where it has another type
  local runs = request[1] == 'queued' or request[1] == 'processing' or request[1] == 'riding'
  if runs then return 'in_progress', row[1] end
  -- One that was answered past Redis is known to be completed, but its answer is not here.
  local answered = replayable(request[1], request[2]) and call('HEXISTS', key, 'reply') == 1
  if answered then return 'replayed', row[1] end
end

-- hold(customer, value, fingerprint, id, life_ms, again): from now on the key is this request's, which is kept as long as the
-- key, and never for less than `life_ms`. One that is told again does not take the key from a request that got it after
-- Redis was lost.
local function hold(customer, value, fingerprint, id, life_ms, again)
  local key, row, ms = P .. 'idem:' .. value, P .. 'request:' .. id, math.max(replay_ms, life_ms)
  call('HSET', row, 'idem', value)
  outlive(row, ms)
  holders[customer] = (holders[customer] or 0) + 1
  if again and call('EXISTS', key) == 1 then return end
  call('HSET', key, 'id', id, 'fp', fingerprint)
  call('PEXPIRE', key, ms)
end

-- evict(list, count): the oldest answers of one customer, while there are more of them than may be, or they are over.
local function evict(list, count)
  local last = call('LINDEX', list, -1)
  local sum, rows = last and kept_sum(last) or 0, last and call('LLEN', list) or 0
  while rows > 0 and count > 0 do
    local entry = call('LINDEX', list, 0)
    local upto, cost, over, life, id, value = string.match(entry, '^(%d+) (%d+) (%d+) (%d+) (%S+) (.*)$')
    if upto and rows <= replay_rows and sum - upto + cost <= replay_bytes and tonumber(over) > now then return end
    call('LPOP', list)
    rows, count = rows - 1, count - 1
    if upto then
      local stored = tonumber(redis.pcall('HGET', P .. 'request:' .. id, 'stored')) -- a job whose end is in PostgreSQL
      shorten(id, value, math.min(life, stored or life) - now)
    end
  end
end

-- make_room(): for the customers whose requests took keys in this call. Only what has ended is in their lists.
local function make_room()
  for customer, count in pairs(holders) do evict(P .. 'replays:' .. customer, MOST_EVICTED + 2 * count) end
end
