-- entering: Idempotency-Keys, and what an accepted submission leaves in Redis (needs asking, retry_budget and row).
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

-- entering: what an accepted submission leaves in Redis (needs prelude, row, asking, idempotency and retry_budget).
-- store(g, o, ...) for each submission of group g, then enter(), which queues and notes them all at once. The time of a
-- request runs from when its gateway called, which `came` says. `state` is 'queued' unless another is given.
local noted, queued, fresh = {}, {}, 0
local LARGE_BYTES = 32768 -- 256 kB add about 4 ms to a batch.

-- who(g, paid, marks) -> what the rows of a group's requests have in common; `marks` is what only some of them have.
local function who(g, paid, marks)
  local kind = paid .. marks
  if g.who[kind] then return g.who[kind] end
  local tail = string.find(paid, 'nothing', 1, true) and '-' or (g.key and g.key_id or '-') .. g.customer.windows
  g.who[kind] = table.concat({gateway, g.customer_id, g.tier.name, paid, tail}, ' ') .. marks
  return g.who[kind]
end

local function store(g, o, key, body, keep_ms, came, paid, state)
  local id, total_ms, rare, n = asked[o + ID], asked[o + TOTAL_MS], asked[o + RARE], #noted
  local env = stamp[now] .. stamp[came + total_ms] .. stamp[came + asked[o + QUEUE_MS]] .. estimate[asked[o + TOKENS]] .. asked[o + NONCE]
  local keyed, marks = rare and rare[1] ~= '', asked[o + LENGTH] > LARGE_BYTES and ' large' or ''
  if keyed then marks = marks .. ' idem ' .. ARGV[7] end
  call('HSET', key, 'state', state or 'queued', 'env', env, 'who', marks == '' and g.who[paid] or who(g, paid, marks), 'body', body)
  if sub(paid, 1, 6) == 'listed' then call('HSET', key, 'charged', charged(g.customer, o)) end
  call('PEXPIRE', key, decimal[total_ms + keep_ms])
  if keyed then hold(g.customer_id, rare[1], rare[2], id, total_ms + keep_ms, rare[3]) end
  if not state or state == 'queued' then
    local ids = g.tier.ids
    ids[#ids + 1] = id
    if not (rare and rare[3]) then fresh = fresh + 1 end
  end
  noted[n + 1], noted[n + 2], noted[n + 3], noted[n + 4] = id, asked[o + GROUP], asked[o + BYTES], asked[o + TRACE]
end

-- enter() -> whether there was any.
local function enter()
  if #noted == 0 then return false end
  for name, t in pairs(tiers) do
    if t.ids[1] then call('LPUSH', P .. 'queue:' .. name, unpack(t.ids)) end
  end
  call('LPUSH', P .. 'outbox', '\145\148\161c' .. packed[gateway] .. ARGV[5] .. cmsgpack.pack(noted))
  if fresh > 0 then deposit(fresh) end
  return true
end
