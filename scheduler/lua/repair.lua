#!lua flags=allow-oom
-- repair: set aside every index of this pool that has another type than ours: any command on it fails for as long as it
-- stands. What is to be built again is noted, so that whoever is killed meanwhile leaves it to the next.
-- KEYS[1] leases. ARGV: 1 prefix, 2 packed tier names, 3 ms that what was set aside is kept, 4 ms that the note is kept.
-- Returns {names set aside now, names that are to be built again, now in ms}.
-- include: prelude
local types = {batch_queue = 'list', leases = 'zset', outbox = 'list', outbox_bad = 'list', dlq = 'list', auditors = 'set',
  retry_budget = 'hash', wake = 'list', wake_at = 'hash', reaped_at = 'string', resumed_at = 'string', epoch = 'string',
  gpus = 'zset', cordoned = 'set', gateways = 'zset', healthy_gpu_count = 'string', notices = 'zset', sharing = 'zset',
  same_kept = 'zset', damaged = 'list', quotas_told = 'string', refusal_lists = 'zset', history = 'list'}
for _, tier in ipairs(cmsgpack.unpack(ARGV[2])) do types['queue:' .. tier] = 'list' end

local found = {}
local function check(name, wanted)
  local is = call('TYPE', P .. name).ok
  if is == wanted or is == 'none' then return end
  local aside = P .. 'bad:' .. name .. ':' .. string.format('%.0f', now)
  call('RENAME', P .. name, aside)
  call('PEXPIRE', aside, tonumber(ARGV[3]))
  call('SADD', P .. 'repairs', name)
  call('PEXPIRE', P .. 'repairs', tonumber(ARGV[4]))
  found[#found + 1] = name
  -- Another epoch: gateways tell again what they know to wait, and what ended lately, as to a Redis that came back empty.
  if name == 'outbox' then call('DEL', P .. 'epoch') end
end
check('repairs', 'set') -- first: the others are noted there
for name, wanted in pairs(types) do check(name, wanted) end
return {found, call('SMEMBERS', P .. 'repairs'), now}
