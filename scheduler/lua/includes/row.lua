-- row: `request:<id>` as it is written and read (needs prelude). What never changes is two texts, since each field of a
-- hash costs as much as a text is long: `env` is the request's own, "<at> <deadline> <queue deadline> <tokens> <nonce>" in
-- fixed columns; `who` is the same for many, "<gateway> <customer> <tier> <paid> <key> <period> <window>...", and is taken
-- apart once a call. `paid` says what was charged: 'all', 'requests' (no model tokens) or 'nothing', with a + where the
-- request shares its run with equal ones; what is told of that stands in fields that other rows do not have. Behind the
-- windows stands "idem <ms>" where it has an Idempotency-Key: for so long after its deadline it would live without.
local STATE, BATCH, ENV, WHO, AT, DEADLINE, QUEUE_DEADLINE = 1, 2, 3, 4, 5, 6, 7
local sub, parties, SHARED = string.sub, {}, 43

-- number[text], stamp[ms], estimate[tokens]: to and from the columns of `env`; 13 digits last until the year 2286.
local number = setmetatable({}, {__index = function(known, text)
  known[text] = tonumber(text)
  return known[text]
end})

local stamp = setmetatable({}, {__index = function(known, ms)
  known[ms] = string.format('%013.0f ', ms)
  return known[ms]
end})

local estimate = setmetatable({}, {__index = function(known, tokens)
  known[tokens] = string.format('%010.0f ', math.min(tokens, 9999999999))
  return known[tokens]
end})

-- read(id, last) -> row, whose times are numbers; the last field is `who` unless another is named, and is then row[WHO].
-- STATE is false where nothing is known of it, ENV where only its end is.
local function read(id, last)
  local row = call('HMGET', P .. 'request:' .. id, 'state', 'batch', 'env', last or 'who')
  local env = row[ENV]
  if env then row[AT], row[DEADLINE], row[QUEUE_DEADLINE] = number[sub(env, 1, 13)], number[sub(env, 15, 27)], number[sub(env, 29, 41)] end
  return row
end

local function tokens_of(row) return number[sub(row[ENV], 43, 52)] end

local function open(row)
  return row[STATE] == 'queued' or row[STATE] == 'processing' or row[STATE] == 'riding'
end

-- party(row) -> {gateway, customer, tier, paid, key ('-' where it has no limit of its own), windows, shared, keep_ms}, whose
-- request it is, whether it shares its run, and whether it has an Idempotency-Key.
local function party(row)
  local p = parties[row[WHO]]
  if p then return p end
  local gateway, customer, tier, paid, key, windows = string.match(row[WHO], '^(%S*) (%S*) (%S*) (%S*) (%S*)(.*)$')
  local charged, keep_ms = string.match(windows, '^(.*) idem (%d+)$')
  p = {gateway = gateway, customer = customer, tier = tier, paid = paid, key = key, windows = charged or windows,
    keep_ms = tonumber(keep_ms)}
  if string.byte(paid, -1) == SHARED then p.shared, p.paid = true, sub(paid, 1, -2) end
  parties[row[WHO]] = p
  return p
end
