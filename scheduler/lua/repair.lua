#!lua flags=allow-oom
-- repair: rename every index of this pool that has a wrong type, because every command on it fails. Indexes to rebuild are
-- recorded, so that the next process continues if this one is killed.
-- KEYS[1] leases. ARGV: 1 prefix, 2 packed tier names, 3 ms that a renamed key is kept, 4 ms that the record is kept.
-- Returns {names renamed now, names to rebuild, now in ms}.
-- include: prelude
local types = {batch_queue = 'list', leases = 'zset', outbox = 'list', outbox_bad = 'list', dlq = 'list', auditors = 'set',
  retry_budget = 'hash', wake = 'list', wake_at = 'hash', reaped_at = 'string', resumed_at = 'string', epoch = 'string',
  gpus = 'zset', cordoned = 'set', gateways = 'zset', healthy_gpu_count = 'string', notices = 'zset', sharing = 'zset',
  same_kept = 'zset', damaged = 'list', quotas_told = 'string', refusal_lists = 'zset', history = 'list'}
for _, tier in ipairs(cmsgpack.unpack(ARGV[2])) do types['queue:' .. tier] = 'list' end

local renamed = {}
local function check(name, expected)
  local actual = call('TYPE', P .. name).ok
  if actual == expected or actual == 'none' then return end
  local bad_key = P .. 'bad:' .. name .. ':' .. string.format('%.0f', now)
  call('RENAME', P .. name, bad_key)
  call('PEXPIRE', bad_key, tonumber(ARGV[3]))
  call('SADD', P .. 'repairs', name)
  call('PEXPIRE', P .. 'repairs', tonumber(ARGV[4]))
  renamed[#renamed + 1] = name
  -- A new epoch makes gateways resubmit pending requests and send recent audit records, as after a loss of data.
  if name == 'outbox' then call('DEL', P .. 'epoch') end
end
check('repairs', 'set') -- first, because the others are recorded in it
for name, expected in pairs(types) do check(name, expected) end
return {renamed, call('SMEMBERS', P .. 'repairs'), now}
