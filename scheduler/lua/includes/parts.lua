-- parts: a lost batch in smaller ones (needs prelude, ending and batch). Each is a batch of its own, never mixed with
-- fresh work.

-- parts(seen, losses, count): in how many batches `count` members run next. What a supervisor saw die or hang was most
-- likely done by one of them: in halves, then one by one, so that in its last attempt the guilty one is alone and ends
-- alone. A lease runs out with a host or a network as well: whole at first.
local function parts(seen, losses, count)
  if losses > 1 then return count end
  return seen and math.min(2, count) or 1
end

-- split(batch, kept, count, rule): batches `<id>.1`, `<id>.2`... of their own, the first of them first in line.
local function split(batch, kept, count, rule)
  drop_batch(batch)
  for part = count, 1, -1 do
    local piece, lists = {id = batch.id .. '.' .. part, tiers = {}, losses = batch.losses, formed = batch.formed, last = now}, {}
    local first, last = math.floor((part - 1) * #kept / count) + 1, math.floor(part * #kept / count)
    for i = first, last do
      local tier = kept[i].tier
      piece.last = math.max(piece.last, kept[i].row[DEADLINE])
      if not lists[tier] then lists[tier], piece.tiers[#piece.tiers + 1] = P .. 'inflight:' .. tier .. ':' .. piece.id, tier end
      call('LPUSH', lists[tier], kept[i].id)
      call('HSET', P .. 'request:' .. kept[i].id, 'batch', piece.id)
    end
    stand_first(piece, last - first + 1, rule.lease_ms, rule.keep_ms)
  end
end
