-- verdicts: what each submission is told, as `Verdict` is decoded (needs prelude and judging). Numbers have fixed lengths, so
-- that one call packs them all.
local DOUBLE, UINT32, MOST, NO_TEXT, NO_QUOTAS = 203, 206, 4294967295, '\160', '\144'
local FORM = '>Bc0BdBI4BI4BI4c0BdBI4BI4c0c0'

-- verdict(...) -> it, packed. Only a wait for the end of a long quota is too long for four bytes.
local function verdict(outcome, g, retry_ms, stored_id, shadowed)
  local left, reset_ms, budget, budget_ms, used, quotas = standing(g.customer, g.key)
  local waiting = depth[g.tier.name]
  if retry_ms > MOST then
    return cmsgpack.pack({outcome, left, reset_ms, retry_ms, waiting, stored_id or '', budget, budget_ms, used, quotas, shadowed or ''})
  end
  return struct.pack(FORM, 155, packed[outcome], DOUBLE, left, UINT32, reset_ms, UINT32, retry_ms, UINT32, waiting,
    stored_id and packed[stored_id] or NO_TEXT, DOUBLE, budget, UINT32, budget_ms, UINT32, used,
    quotas and cmsgpack.pack(quotas) or NO_QUOTAS, shadowed and packed[shadowed] or NO_TEXT)
end
