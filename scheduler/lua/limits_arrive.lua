#!lua flags=allow-oom
-- limits_arrive: the limits of customers arrive in this cell, which becomes their home, with what other cells had left of them. The
-- first call decides; a later one changes nothing. No bucket is fuller than the emptiest of those in any cell, refilled since.
-- KEYS[1] leases. ARGV: version of the catalog by which this cell is their home; packed_arrivals {{customer id, buckets as in
--   customer, {{key id, rate, size}...}, whether a cell that may have had them is lost: then buckets start empty, {{cell, state as
--   limits_leave returns it}...}}...}; packed_kinds of buckets.
-- Returns for each customer 0, or the version of the newer catalog by which it has another home.
-- include: prelude, ratelimit/bucket
local replies, bucket_kinds, KEY_KIND = {}, cmsgpack.unpack(packed_kinds), {'', 'tokens', 'rate', 1}
local FRESH_STATE, FIELDS_LIFE, AGE, FIELDS, OPEN, KEYS_LEFT = 2, 3, 4, 5, 6, 7 -- of a state

local function hash(key)
  local found, fields = {}, call('HGETALL', key)
  for i = 1, #fields, 2 do found[fields[i]] = fields[i + 1] end
  return found
end

-- lowest(known, kind, rate, size, is_new) -> the lowest level of a bucket now in {{us, fields}...}, or nil, and its rate. `rate` and
-- `size` are nil if the limit is not known: then it is not refilled. is_new: the level of a bucket that was lost counts too.
local function lowest(known, kind, rate, size, is_new)
  local level, found_rate = nil, rate
  for _, each in ipairs(known) do
    local tokens, old = tonumber(each[2][kind[2]]), tonumber(each[2][kind[3]])
    if tokens then
      local per_s = rate and rate / kind[4] or 0
      local left = refilled(tokens, now_us - each[1], old and old / kind[4], per_s, size or tokens)
      if not level or left < level then level, found_rate = left, rate or old end
    end
  end
  if level and rate and is_new then level = math.min(level, refilled(nil, nil, nil, rate / kind[4], size)) end
  return level, found_rate
end

-- store(key, known, kinds, limits, is_new, is_empty, fields, keep_ms): writes the buckets and `fields`.
local function store(key, known, kinds, limits, is_new, is_empty, fields, keep_ms)
  local first, n = #fields, #fields
  for i, kind in ipairs(kinds) do
    local rate, size = limits[i] and limits[i][1], limits[i] and limits[i][2]
    local level, found_rate = lowest(known, kind, rate, size, is_new)
    if is_empty and rate then level = math.min(level or 0, 0) end
    if level then
      fields[n + 1], fields[n + 2], fields[n + 3], fields[n + 4] = kind[2], string.format('%.9f', level), kind[3], found_rate or 0
      n = n + 4
      if rate then keep_ms = math.max(keep_ms, ttl_ms(level, size, rate / kind[4])) end
    end
  end
  if n > first then fields[n + 1], fields[n + 2] = 'at', string.format('%.0f', now_us) end
  call('HSET', key, unpack(fields))
  extend_ttl(key, keep_ms)
end

-- add_quotas(found, fields): of each quota the later window, or the higher count.
local function add_quotas(found, fields)
  for name, value in pairs(fields) do
    local number, spent = string.match(value, '^(%d+) (%d+)$')
    local known_number, known = string.match(found[name] or '-1 0', '^(-?%d+) (%d+)$')
    number, spent, known_number = tonumber(number), tonumber(spent), tonumber(known_number)
    if number and string.sub(name, 1, 2) == 'q:' and
      (number > known_number or number == known_number and spent > tonumber(known)) then found[name] = value end
  end
end

-- all_quotas(own, states) -> the counts by quota. Those of cells that shared a quota (`shared`) are added to each other. If this cell
-- still has a part, the others count without it.
local function all_quotas(own, states)
  local quotas, sums = {}, {}
  add_quotas(quotas, own)
  local hashes = {own.shared and not own.share and own or {}}
  for i, each in ipairs(states) do hashes[i + 1] = each[2][FIELDS] end
  for _, fields in ipairs(hashes) do
    if not fields.shared then add_quotas(quotas, fields)
    elseif not own.share then
      for name, value in pairs(fields) do
        local number, spent = string.match(value, '^(%d+) (%d+)$')
        local known_number, known = string.match(sums[name] or '', '^(%d+) (%d+)$')
        if number and number == known_number then sums[name] = string.format('%s %.0f', number, spent + known)
        elseif number and tonumber(number) > (tonumber(known_number) or -1) then sums[name] = value end
      end
    end
  end
  add_quotas(quotas, sums)
  return quotas
end

-- copy_open(id, states): requests that run in other cells count here until their leases end, as `<cell>/<id>`; those of jobs for at
-- most a minute, since nobody tells this cell that they have ended.
local MOST_OPEN_MS = 60000
local function copy_open(id, states)
  local key, answered, longest = T .. 'rl:leases:' .. id, {}, 0
  for _, each in ipairs(states) do answered[each[1]] = true end
  for _, member in ipairs(call('ZRANGE', key, 0, -1)) do
    if answered[string.match(member, '^(.-)/') or ''] then call('ZREM', key, member) end
  end
  for _, each in ipairs(states) do
    local open = each[2][OPEN]
    for i = 1, #open, 2 do
      local left = math.min(open[i + 1], MOST_OPEN_MS)
      call('ZADD', key, now + left, each[1] .. '/' .. open[i])
      longest = math.max(longest, left)
    end
  end
  if longest > 0 then extend_ttl(key, longest + 600000) end
end

local function arrive(id, limits, is_empty, states)
  local key = T .. 'rl:customer:' .. id
  local own, known, is_fresh, keep_ms, moved_at = hash(key), {}, false, MIN_TTL_MS, 0
  local state, decided = string.match(own.home or '', '^(%a+) (%d+)')
  if state == 'here' then return decided end
  if state == 'left' and tonumber(decided) > version then return nil, tonumber(decided) end
  if own.at then known[1] = {now_us - own.at, own} end
  for _, each in ipairs(states) do
    local s = each[2]
    keep_ms = math.max(keep_ms, s[FIELDS_LIFE])
    if s[AGE] then known[#known + 1], is_fresh, moved_at = {s[AGE], s[FIELDS]}, is_fresh or s[FRESH_STATE], now end
  end
  local by_kind, fields = {}, {'home', string.format('here %.0f %.0f', version, moved_at)}
  for _, b in ipairs(limits) do by_kind[b[1]] = {b[2], b[3]} end
  for name, value in pairs(all_quotas(own, states)) do fields[#fields + 1], fields[#fields + 2] = name, value end
  if not own.share then call('HDEL', key, 'shared') end
  store(key, known, bucket_kinds, by_kind, not own.at and not is_fresh, is_empty, fields, keep_ms)
  copy_open(id, states)
  return string.format('%.0f', version)
end

-- key_arrives(number, limit, version_here, is_empty, states): the bucket of the number-th key, once while the customer is here.
local function key_arrives(number, limit, version_here, is_empty, states)
  local key, known = T .. 'rl:key:' .. limit[1], {}
  local own = hash(key)
  if own.home == version_here then return end
  if own.at then known[1] = {now_us - own.at, own} end
  for _, each in ipairs(states) do known[#known + 1] = each[2][KEYS_LEFT][number] or nil end
  store(key, known, {KEY_KIND}, {{limit[2], limit[3]}}, false, is_empty, {'home', version_here}, MIN_TTL_MS)
end

for i, each in ipairs(cmsgpack.unpack(packed_arrivals)) do
  local id, limits, key_limits, is_empty, states = unpack(each)
  local version_here, newer = arrive(id, limits, is_empty, states)
  for n, limit in ipairs(version_here and key_limits or {}) do key_arrives(n, limit, version_here, is_empty, states) end
  replies[i] = newer or 0
end
return replies
