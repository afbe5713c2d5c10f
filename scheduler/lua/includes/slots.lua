-- slots: the free slots of workers that start and end requests one by one (needs prelude).
-- `slots`: "<free> <slots>" of each worker that can run requests now. Workers report free slots as a number, or as a change
-- while one of their claims is in progress. `unclaimed`: the sizes of batches that were formed for slots and not claimed.
-- By pcall: requests must end while one of these keys has a wrong type (`repair` renames it), and workers without slots may have
-- older ACL rules, which do not allow them.
local slots = {UNCLAIMED_MS = 60000}

local function read_slots(text)
  local free, total = string.match(text or '', '^(%-?%d+) (%d+)$')
  return tonumber(free), tonumber(total)
end

-- slots.report(worker, free, total, change) -> whether it has more free slots than before. `free` is nil if only the change is
-- known. Only a heartbeat, which has no change, adds a worker: one that starts nothing more still ends requests.
function slots.report(worker, free, total, change)
  local stored = redis.pcall('HGET', P .. 'slots', worker)
  local was_free, was_total = read_slots(type(stored) == 'string' and stored)
  if change and not was_free then return false end
  free = free or was_free and was_free + (change or 0) + total - was_total or 0
  if free ~= was_free or total ~= was_total then redis.pcall('HSET', P .. 'slots', worker, free .. ' ' .. total) end
  return free > (was_free or 0)
end

-- slots.remove(worker): the worker can run nothing now.
function slots.remove(worker) redis.pcall('HDEL', P .. 'slots', worker) end

-- slots.forget(is_usable): removes the workers for which is_usable(worker) is false.
function slots.forget(is_usable)
  for _, worker in ipairs(redis.pcall('HKEYS', P .. 'slots')) do
    if not is_usable(worker) then slots.remove(worker) end
  end
end

-- slots.view() -> {free slots without those of unclaimed batches, slots, the fewest free slots of a worker that has any}; nil if
-- no worker has slots.
function slots.view()
  local stored = redis.pcall('HVALS', P .. 'slots')
  if #stored == 0 then return nil end
  local all_free, all, fewest = 0, 0, 0
  for _, text in ipairs(stored) do
    local free, total = read_slots(text)
    all = all + (total or 0)
    if free and free > 0 then
      all_free, fewest = all_free + free, fewest > 0 and math.min(fewest, free) or free
    end
  end
  for _, size in ipairs(all_free > 0 and redis.pcall('HVALS', P .. 'unclaimed') or {}) do
    all_free = all_free - (tonumber(size) or 0)
  end
  return {math.max(0, all_free), all, fewest}
end

-- slots.formed(batch, size), slots.claimed(batch): a batch waits for its claim, or does not any more.
function slots.formed(batch, size)
  redis.pcall('HSET', P .. 'unclaimed', batch, size)
  redis.pcall('PEXPIRE', P .. 'unclaimed', slots.UNCLAIMED_MS)
end

function slots.claimed(batch) redis.pcall('HDEL', P .. 'unclaimed', batch) end
