-- row: `request:<id>` as it is written and read (needs prelude). What never changes is two texts, since each field of a
-- hash costs as much as a text is long: `env` is the request's own, "<at> <deadline> <queue deadline> <tokens> <nonce>" in
-- fixed columns; `who` is the same for many, "<gateway> <customer> <tier> <paid> <key> <period> <window>...", and is taken
-- apart once a call. `paid` says what was charged: 'all' (and model tokens), 'requests', 'listed' (the field `charged`
-- has the units of each bucket) or 'nothing', with a + where the request shares its run with equal ones; what is told of that stands in fields that other rows do not have. Behind the
-- windows stands "large" where the body is, and "idem <ms>" where it has an Idempotency-Key: for so long after its
-- deadline it would live without.
local STATE, BATCH, ENV, WHO, AT, DEADLINE, QUEUE_DEADLINE = 1, 2, 3, 4, 5, 6, 7
local sub, parties, SHARED = string.sub, {}, 43
local NONCE = 53 -- bytes of `env` before the nonce, which a job does not have
local damaged, DAMAGED_CAP, DAMAGED_MS = {}, 1000, 30000

-- number[text], stamp[ms], estimate[tokens]: to and from the columns of `env`; 13 digits last until the year 2286.
local number = setmetatable({}, {__index = function(known, text)
  local found = tonumber(text)
  known[text] = found -- nil where it is none: no field is made
  return found
end})

local stamp = setmetatable({}, {__index = function(known, ms)
  known[ms] = string.format('%013.0f ', ms)
  return known[ms]
end})

local estimate = setmetatable({}, {__index = function(known, tokens)
  known[tokens] = string.format('%010.0f ', math.min(tokens, 9999999999))
  return known[tokens]
end})

-- party(row) -> {gateway, customer, tier, paid, key ('-' where it has no limit of its own), windows, shared, large, keep_ms},
-- whose request it is, whether it shares its run, whether its body is large, and whether it has an Idempotency-Key; nil
-- where `who` is none.
local function party(row)
  local text = row[WHO]
  local p = parties[text]
  if p or not text then return p end
  local gateway, customer, tier, paid, key, windows = string.match(text, '^(%S+) (%S+) (%S+) (%S+) (%S+)(.*)$')
  if not gateway then return nil end
  local before, keep_ms = string.match(windows, '^(.*) idem (%d+)$')
  windows = before or windows
  local charged = string.match(windows, '^(.*) large$')
  p = {gateway = gateway, customer = customer, tier = tier, paid = paid, key = key, windows = charged or windows,
    large = charged ~= nil, keep_ms = tonumber(keep_ms)}
  if string.byte(paid, -1) == SHARED then p.shared, p.paid = true, sub(paid, 1, -2) end
  parties[text] = p
  return p
end

local function open(row)
  return row[STATE] == 'queued' or row[STATE] == 'processing' or row[STATE] == 'riding'
end

-- set_aside(id, row): a row of another format is no request any more, so that no script meets it twice. It is noted without
-- what the customer sent; `flush` ends it for its gateway and the audit, as far as the row still says whose it is.
local function set_aside(id, row)
  local key = P .. 'request:' .. id
  if row.err then call('DEL', key)
  else
    call('HSET', key, 'state', 'failed', 'code', 'internal_error', 'ended', string.format('%.0f', now), 'body', '')
    call('PEXPIRE', key, DAMAGED_MS)
  end
  local shown = {id, now, sub(row.err or row[ENV] or '', 1, 200), sub(row[WHO] or '', 1, 200)}
  redis.pcall('LPUSH', P .. 'damaged', cmsgpack.pack(shown))
  redis.pcall('LTRIM', P .. 'damaged', 0, DAMAGED_CAP - 1)
  redis.log(redis.LOG_WARNING, 'The row of ' .. id .. ' is damaged or of another version and was set aside.')
  damaged[#damaged + 1] = {id = id, env = row[ENV], who = row[WHO]}
  return {false, false, false, false}
end

-- peek(id, last) -> row, whose times are numbers, and whether it is damaged; the last field is `who` unless another is named,
-- and is then row[WHO]. STATE is false where nothing is known of it, ENV where only its end is.
local function peek(id, last)
  local row = redis.pcall('HMGET', P .. 'request:' .. id, 'state', 'batch', 'env', last or 'who')
  local env = row[ENV]
  if not env then return row, row.err and of_wrong_type(row.err) or open(row) end
  local at, deadline, queue_deadline = number[sub(env, 1, 13)], number[sub(env, 15, 27)], number[sub(env, 29, 41)]
  row[AT], row[DEADLINE], row[QUEUE_DEADLINE] = at, deadline, queue_deadline
  if at and deadline and queue_deadline and #env >= NONCE and (last or parties[row[WHO]] or party(row)) then return row, false end
  return row, open(row)
end

-- read(id, last) -> the same row; one that is damaged is set aside, and its STATE is false. Only for scripts that `flush`.
local function read(id, last)
  local row, is_damaged = peek(id, last)
  if not is_damaged then return row end
  if last and not row.err then row[WHO] = call('HGET', P .. 'request:' .. id, 'who') end
  return set_aside(id, row)
end

local function tokens_of(row) return number[sub(row[ENV], 43, 52)] or 0 end

-- replays: what is kept of a request with an Idempotency-Key after its end (needs prelude). `replays:<customer>` lists the
-- answers, oldest first: "<sum of costs up to this one> <cost> <TIME of its end of life> <the same without a key> <id> <value>".
-- A cost is the bytes that row, key and entry take in Redis: a little more than was measured. Ends call this by pcall: nothing
-- that is wrong here may keep an answer back.
local FINAL = {poison_request = true, invalid_request = true} -- failures that another run would only repeat
local COST, COST_PER_BYTE = 1200, 1.25

local function replayable(state, code) return state == 'completed' or FINAL[code] end

local function kept_sum(entry) return tonumber(string.match(entry, '^%d+') or 0) end

-- shorten(id, value, ms): the row and its key live for so long from now on, and go at once where that is over.
local function shorten(id, value, ms)
  local key = P .. 'idem:' .. value
  call('PEXPIRE', P .. 'request:' .. id, ms)
  if call('HGET', key, 'id') == id then call('PEXPIRE', key, ms) end
end

-- keep_replay(id, customer, keep_ms, deadline, bytes): a row that has ended. Without `bytes` of a reply that may be replayed it
-- lives as long as any other row: until `keep_ms` after its deadline.
local function keep_replay(id, customer, keep_ms, deadline, bytes)
  local key, list = P .. 'request:' .. id, P .. 'replays:' .. customer
  local value, ms, life_ms = call('HGET', key, 'idem'), call('PTTL', key), math.max(0, deadline - now) + keep_ms
  if not value or ms <= life_ms then return end
  if not bytes then return shorten(id, value, life_ms) end
  local last, cost = call('LINDEX', list, -1), math.ceil(COST + COST_PER_BYTE * bytes)
  call('RPUSH', list, string.format('%.0f %.0f %.0f %.0f %s %s', (last and kept_sum(last) or 0) + cost, cost, now + ms,
    now + life_ms, id, value))
  if call('PTTL', list) < ms then call('PEXPIRE', list, ms) end
end
