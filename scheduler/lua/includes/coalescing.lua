-- coalescing: equal submissions share one run, or get an answer that is kept (needs asking, charge, entering, row and same).
-- answering: a submission whose answer is kept has ended as it came (needs asking, row, replays and same). Its reply goes with the
-- verdict: nobody has to be told by a message.
local answered = {}

-- answer_now(g, o, key, paid, answer) -> its reply: it completed as it came. Of its tokens it pays what the answer has.
local function answer_now(g, o, key, paid, answer)
  local used, bytes, tail = cmsgpack.unpack(answer)
  local id, nonce, n, c = asked[o + ID], asked[o + NONCE], #answered, g.customer
  local reply = '\220\0\17' .. text_head[#id] .. id .. packed[g.customer_id] .. text_head[#nonce] .. nonce ..
    cmsgpack.pack('completed', '', 0, -1, '', 0, '') .. tail .. packed.cache
  call('HSET', key, 'ended', string.format('%.0f', now), 'reply', reply)
  if asked[o + RARE][1] ~= '' then keep_replay(id, g.customer_id, tonumber(ARGV[7]), came + asked[o + TOTAL_MS], #reply) end
  if paid ~= 'nothing' and used > 0 then settle_charge(c, o, used) end
  for i, v in ipairs({id, 0, -1, -1, used, bytes}) do answered[n + i] = v end
  return reply
end

-- note_answered(): the audit's record of all that completed so.
local function note_answered()
  if #answered == 0 then return end
  call('LPUSH', P .. 'outbox', '\145\154\161f' .. cmsgpack.pack('completed', '', now, '', 0, '', 0, answered, 'cache'))
end

-- with_reply(told, reply): a verdict, packed, with one field more where there is a reply, as a bin.
local function with_reply(told, reply)
  return reply and '\151' .. sub(told, 2) .. struct.pack('>BI2', 0xc5, #reply) .. reply or told
end

-- collapsing: equal submissions share one run, or an answer that is kept (needs asking, row, same, entering,
-- charge and answering). Each has its own row, audit records and lease; only one of them stands in a queue.

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
