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
