-- row: how `request:<id>` is written and read (needs prelude). The constant data is two strings, because each hash field costs
-- time. `env` belongs to one request: "<accepted at> <deadline> <queue deadline> <tokens> <nonce>" in fixed columns. `who` is
-- the same for many requests, and is parsed once per call:
-- "<gateway> <customer> <tier> <charged> <key> <period> <window>...". `charged` is 'all' (one request and its tokens),
-- 'requests', 'listed' (the field `charged` has the units of each bucket) or 'nothing', with a + if the request is coalesced.
-- After the quota windows follow "large" for a large body, and "idem <ms>" for an Idempotency-Key: how long after its deadline
-- the row would live without one.
local STATE, BATCH, ENV, WHO, AT, DEADLINE, QUEUE_DEADLINE = 1, 2, 3, 4, 5, 6, 7
local sub, accounts = string.sub, {}
local NONCE = 53 -- bytes of `env` before the nonce, which is empty for a job
local damaged, REQUEST = {}, P .. 'request:'

-- times_of[columns], number[text], time_column[ms], token_column[tokens]: parse and format the columns of `env`; 13 digits last
-- until the year 2286. Requests that were admitted together mostly have the same columns of times, the first TIMES_END bytes.
local TIMES_END = 41
local times_of = setmetatable({}, {__index = function(memo, columns)
  local accepted_at, deadline = tonumber(sub(columns, 1, 13)), tonumber(sub(columns, 15, 27))
  local queue_deadline = tonumber(sub(columns, 29, TIMES_END))
  local times = accepted_at and deadline and queue_deadline and {accepted_at, deadline, queue_deadline}
  memo[columns] = times -- nil if one is not a number: then no entry is made
  return times
end})

local number = setmetatable({}, {__index = function(memo, text)
  local value = tonumber(text)
  memo[text] = value -- nil if it is not a number: then no entry is made
  return value
end})

local time_column = setmetatable({}, {__index = function(memo, ms)
  memo[ms] = string.format('%013.0f ', ms)
  return memo[ms]
end})

local token_column = setmetatable({}, {__index = function(memo, tokens)
  memo[tokens] = string.format('%010.0f ', math.min(tokens, 9999999999))
  return memo[tokens]
end})

-- account_of(row) -> {gateway, customer, tier, charged, key ('-' without a limit of its own), windows, coalesced, large,
-- keep_ms (with an Idempotency-Key)}: the parsed field `who`; nil if it is not valid.
local function account_of(row)
  local text, COALESCED = row[WHO], 43
  local account = accounts[text]
  if account or not text then return account end
  local gateway, customer, tier, charged, key, windows = string.match(text, '^(%S+) (%S+) (%S+) (%S+) (%S+)(.*)$')
  if not gateway then return nil end
  local before_key, keep_ms = string.match(windows, '^(.*) idem (%d+)$')
  windows = before_key or windows
  local before_large = string.match(windows, '^(.*) large$')
  account = {gateway = gateway, customer = customer, tier = tier, charged = charged, key = key, windows = before_large or windows,
    large = before_large ~= nil, keep_ms = tonumber(keep_ms)}
  if string.byte(charged, -1) == COALESCED then account.coalesced, account.charged = true, sub(charged, 1, -2) end
  accounts[text] = account
  return account
end

local OPEN = {queued = true, processing = true, riding = true}
local function is_open(row) return OPEN[row[STATE]] or false end

-- quarantine(id, row): a row that cannot be read becomes a failed request, so that no script reads it again. It is recorded
-- without the input. `flush` reports its end to its gateway and the audit, if the row still names them.
local function quarantine(id, row)
  local key, DAMAGED_MAX, DAMAGED_MS = P .. 'request:' .. id, 1000, 30000
  if row.err then call('DEL', key)
  else
    call('HSET', key, 'state', 'failed', 'code', 'internal_error', 'ended', string.format('%.0f', now), 'body', '')
    call('PEXPIRE', key, DAMAGED_MS)
  end
  local record = {id, now, sub(row.err or row[ENV] or '', 1, 200), sub(row[WHO] or '', 1, 200)}
  redis.pcall('LPUSH', P .. 'damaged', cmsgpack.pack(record))
  redis.pcall('LTRIM', P .. 'damaged', 0, DAMAGED_MAX - 1)
  redis.log(redis.LOG_WARNING, 'The row of ' .. id .. ' is damaged or of another version and was set aside.')
  damaged[#damaged + 1] = {id = id, env = row[ENV], who = row[WHO]}
  return {false, false, false, false}
end

-- peek_row(id, last_field) -> row, is_damaged. Times in the row are numbers. The last field is `who` unless another is named,
-- which is then in row[WHO]. STATE is false for an unknown request; ENV is false if only its end is stored.
local function peek_row(id, last_field)
  local row = try('HMGET', REQUEST .. id, 'state', 'batch', 'env', last_field or 'who')
  local env = row[ENV]
  if not env then return row, row.err and is_wrong_type(row.err) or is_open(row) end
  local times, who = times_of[sub(env, 1, TIMES_END)], row[WHO]
  if times and #env >= NONCE and (last_field or accounts[who] or account_of(row)) then
    return {row[STATE], row[BATCH], env, who, times[1], times[2], times[3]}, false -- more entries in `row` would resize it
  end
  if times then row[AT], row[DEADLINE], row[QUEUE_DEADLINE] = times[1], times[2], times[3] end
  return row, is_open(row)
end

-- set_aside(id, row, last_field) -> the damaged row of peek_row after its quarantine: its STATE is false. Only for scripts that `flush`.
local function set_aside(id, row, last_field)
  if last_field and not row.err then row[WHO] = call('HGET', P .. 'request:' .. id, 'who') end
  return quarantine(id, row)
end

-- read_row(id, last_field) -> the row of peek_row, a damaged one set aside.
local function read_row(id, last_field)
  local row, is_damaged = peek_row(id, last_field)
  if is_damaged then return set_aside(id, row, last_field) end
  return row
end

local function charged_tokens(row) return number[sub(row[ENV], 43, 52)] or 0 end

-- Replays: what is kept of a request with an Idempotency-Key after its end. `replays:<customer>` lists the stored replies,
-- oldest first: "<sum of costs including this one> <cost> <expiry> <expiry without a key> <id> <value>". A cost is the memory of
-- row, key and entry in bytes, slightly overestimated. These functions run in pcall at the end of a request, so that an error
-- here cannot block its reply.
-- Another run would fail in the same way.
local PERMANENT_FAILURES = {poison_request = true, invalid_request = true, context_length_exceeded = true, request_too_large = true}

local function is_replayable(state, code) return state == 'completed' or PERMANENT_FAILURES[code] end

local function cumulative_cost(entry) return tonumber(string.match(entry, '^%d+') or 0) end

-- shorten_ttl(id, value, ms): the row and its Idempotency-Key expire after `ms`; at once if that is not positive.
local function shorten_ttl(id, value, ms)
  local key = P .. 'idem:' .. value
  call('PEXPIRE', P .. 'request:' .. id, ms)
  if call('HGET', key, 'id') == id then call('PEXPIRE', key, ms) end
end

-- record_replay(id, customer, keep_ms, deadline, bytes): records a request that has ended, with the size of its reply. Without
-- `bytes` (its reply must not be replayed) the row lives as long as other rows: until `keep_ms` after its deadline.
local function record_replay(id, customer, keep_ms, deadline, bytes)
  local ROW_BYTES, PER_BYTE = 1200, 1.25
  local key, list = P .. 'request:' .. id, P .. 'replays:' .. customer
  local value, ms, normal_ms = call('HGET', key, 'idem'), call('PTTL', key), math.max(0, deadline - now) + keep_ms
  if not value or ms <= normal_ms then return end
  if not bytes then return shorten_ttl(id, value, normal_ms) end
  local newest, cost = call('LINDEX', list, -1), math.ceil(ROW_BYTES + PER_BYTE * bytes)
  call('RPUSH', list, string.format('%.0f %.0f %.0f %.0f %s %s', (newest and cumulative_cost(newest) or 0) + cost, cost, now + ms,
    now + normal_ms, id, value))
  if call('PTTL', list) < ms then call('PEXPIRE', list, ms) end
end
