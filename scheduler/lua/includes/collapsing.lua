-- collapsing: equal submissions share one run, or an answer that is kept (needs asking, row, same, entering,
-- customer_save and answering). Each has its own row, audit records and lease; only one of them stands in a queue.

-- match(g, rare) -> 'cached' and the answer that is kept, 'rides' or 'lifts' and the id of the leader; nil where it is to
-- run by itself. One whose own time is over leads nobody, whatever became of it.
local function match(g, rare)
  if not (rare and rare[5]) then return nil end
  local known = call('HMGET', P .. 'same:' .. rare[5], 'answer', 'leader')
  if known[1] then return 'cached', known[1] end
  local row, is_damaged = {}, false
  if known[2] then row, is_damaged = peek(known[2]) end
  if is_damaged or row[STATE] ~= 'queued' and row[STATE] ~= 'processing' or now >= row[DEADLINE] then return nil end
  if row[STATE] == 'processing' then return 'rides', known[2] end
  for _, name in ipairs(g.tier.ahead) do
    if name == party(row).tier then return 'rides', known[2] end
  end
  return 'lifts', known[2]
end

-- shares(g, rare): whether it needs neither a GPU's time nor a place in the queue.
local function shares(g, rare)
  local how = match(g, rare)
  return how == 'cached' or how == 'rides'
end

-- ride(leader, id): it ends when the leader does. The list lives as long as the row of each that is in it.
local function ride(leader, id)
  call('RPUSH', P .. 'riders:' .. leader, id)
  outlive(P .. 'riders:' .. leader, call('PTTL', P .. 'request:' .. id))
end

-- lift(old, id): the leader waits in a lower tier: it rides from now on, as all do who rode on it. Its place in
-- the queue is dead, and passed over.
local function lift(old, id)
  if call('EXISTS', P .. 'riders:' .. old) == 1 then call('RENAME', P .. 'riders:' .. old, P .. 'riders:' .. id) end
  call('HSET', P .. 'request:' .. old, 'state', 'riding', 'lifted', 1)
  ride(id, old)
end

-- join(g, o, ...) -> the reply of one that has ended already: how one enters that may share.
local function join(g, o, key, body, keep_ms, came, paid)
  local rare, id, total_ms = asked[o + RARE], asked[o + ID], asked[o + TOTAL_MS]
  local how, what = match(g, rare)
  store(g, o, key, body, keep_ms, came, paid .. '+', how == 'cached' and 'completed' or how == 'rides' and 'riding' or 'queued')
  if how == 'cached' then return answer_now(g, o, key, paid, what) end
  call('HSET', key, 'same', rare[5] .. ' ' .. string.format('%.0f', rare[6]) .. ' ' .. rare[7])
  hold_lease(g.customer, id, came + total_ms)
  if how == 'rides' then return ride(what, id) end
  depth[g.tier.name] = depth[g.tier.name] + 1
  lead(rare[5], id, came + total_ms - now)
  if how == 'lifts' then lift(what, id) end
end

-- take_in(g, o, key, body, keep_ms, came, paid) -> the reply of one that has ended already.
local function take_in(g, o, key, body, keep_ms, came, paid)
  local rare = asked[o + RARE]
  if rare and rare[5] then return join(g, o, key, body, keep_ms, came, paid) end
  store(g, o, key, body, keep_ms, came, paid)
  hold_lease(g.customer, asked[o + ID], came + asked[o + TOTAL_MS])
  depth[g.tier.name] = depth[g.tier.name] + 1
end
