-- answering: a submission whose answer is kept has ended as it came (needs asking, row, replays and same). Its reply goes with the
-- verdict: nobody has to be told by a message.
local MOST_USED, answered = 100, {}

-- answer_now(g, o, key, paid, answer) -> its reply: it completed as it came. Of its tokens it pays what the answer has.
local function answer_now(g, o, key, paid, answer)
  local used, bytes, tail = cmsgpack.unpack(answer)
  local id, nonce, n, c, tokens = asked[o + ID], asked[o + NONCE], #answered, g.customer, asked[o + TOKENS]
  local reply = '\220\0\17' .. text_head[#id] .. id .. packed[g.customer_id] .. text_head[#nonce] .. nonce ..
    cmsgpack.pack('completed', '', 0, -1, '', 0, '') .. tail .. packed.cache
  call('HSET', key, 'ended', string.format('%.0f', now), 'reply', reply)
  if asked[o + RARE][1] ~= '' then keep_replay(id, g.customer_id, tonumber(ARGV[7]), came + asked[o + TOTAL_MS], #reply) end
  if paid == 'all' and used > 0 and tokens > 0 then c.budget = c.budget + tokens - math.min(used, MOST_USED * tokens) end
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
  return reply and '\156' .. sub(told, 2) .. struct.pack('>BI2', 0xc5, #reply) .. reply or told
end
