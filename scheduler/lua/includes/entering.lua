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
