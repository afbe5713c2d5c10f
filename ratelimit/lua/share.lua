-- share: the parts of its limits that a customer of several cells may use in this one (needs prelude), in ten-thousandths.
-- Field `share` of its hash, written by allot: "<TIME in ms until which it holds> <rates> <concurrency> <quotas>". Later half of
-- the first two holds; the last is the part of a quota in a new window. Without the field such a customer has nothing here yet.
-- Field `g:<quota>`: "<window> <amount that this cell may spend> <whether other cells may spend more>".
local share = {WHOLE = 10000, LONGEST_MS = 6000, RETRY_MS = 1000, NONE = {0, 0, 0}}

-- share.read(text) -> the parts that hold now, ms until half of them hold, the stored parts; nil if there is none. The lease of a
-- server whose clock went back counts as over.
function share.read(text)
  local ends_at, rates, concurrency, quotas = string.match(text or '', '^(%d+) (%d+) (%d+) (%d+)$')
  if not ends_at then return end
  local left, stored = ends_at - now, {tonumber(rates), tonumber(concurrency), tonumber(quotas)}
  if left > 0 and left <= share.LONGEST_MS then return stored, left, stored end
  return {math.floor(rates / 2), math.floor(concurrency / 2), stored[3]}, 0, stored
end

-- share.of(amount, part): the part of a limit.
function share.of(amount, part) return amount * part / share.WHOLE end

-- share.granted(text, number, amount, part, spent) -> the amount that this cell may spend of a quota in the window `number`, and
-- whether other cells may spend more of it. `part`: of a window without a grant; nil: nothing more.
function share.granted(text, number, amount, part, spent)
  local window, grant, others = string.match(text or '', '^(%d+) (%d+) (%d+)$')
  if tonumber(window) == number then return tonumber(grant), others == '1' end
  return part and math.floor(share.of(amount, part)) or spent, true
end
