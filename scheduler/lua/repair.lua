#!lua flags=allow-oom
-- repair: rename every index of this pool that has a wrong type, because every command on it fails. Indexes to rebuild are
-- recorded, so that the next process continues if this one is killed.
-- KEYS[1] leases. ARGV: packed_tiers: their names; keep_ms of a renamed key; record_ms of the record.
-- Returns {names renamed now, names to rebuild, now in ms}.
-- include: prelude
local types = {batch_queue = 'list', leases = 'zset', outbox = 'list', outbox_bad = 'list', dlq = 'list', auditors = 'set',
  retry_budget = 'hash', wake = 'list', wake_at = 'hash', formed_at = 'string', reaped_at = 'string', resumed_at = 'string',
  epoch = 'string', gpus = 'zset', cordoned = 'set', gateways = 'zset', healthy_gpu_count = 'string', notices = 'zset',
  sharing = 'zset', same_kept = 'zset', damaged = 'list', quotas_told = 'string', refusal_lists = 'zset', history = 'list', slots = 'hash',
  unclaimed = 'hash'}
local tiers = cmsgpack.unpack(packed_tiers)
for _, tier in ipairs(tiers) do
  types['queue:' .. tier], types['backlogs:' .. tier], types['waiting:' .. tier] = 'list', 'zset', 'string'
  types['fair:' .. tier] = 'hash'
end

local renamed = {}
local function check(name, expected)
  local actual = call('TYPE', P .. name).ok
  if actual == expected or actual == 'none' then return end
  local bad_key = P .. 'bad:' .. name .. ':' .. string.format('%.0f', now)
  call('RENAME', P .. name, bad_key)
  call('PEXPIRE', bad_key, keep_ms)
  call('SADD', P .. 'repairs', name)
  call('PEXPIRE', P .. 'repairs', record_ms)
  renamed[#renamed + 1] = name
  -- A new epoch makes gateways resubmit pending requests and send recent audit records, as after a loss of data.
  if name == 'outbox' then call('DEL', P .. 'epoch') end
end
check('repairs', 'set') -- first, because the others are recorded in it
for name, expected in pairs(types) do check(name, expected) end
-- Without the index, no script finds the backlogs: their ids are added to the tier queue. A lost number is positive again.
for _, tier in ipairs(tiers) do
  local has_number, has_index = tonumber(call('GET', P .. 'waiting:' .. tier) or nil), call('EXISTS', P .. 'backlogs:' .. tier) == 1
  if has_index and not has_number then call('SET', P .. 'waiting:' .. tier, 1)
  elseif has_number and not has_index then
    call('DEL', P .. 'waiting:' .. tier)
    call('SADD', P .. 'repairs', 'backlogs:' .. tier)
    call('PEXPIRE', P .. 'repairs', record_ms)
  end
end
return {renamed, call('SMEMBERS', P .. 'repairs'), now}
