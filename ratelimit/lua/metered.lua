-- metered: quotas of GPU time, tokens and money, whose use is known only when a request ends (needs prelude). Admission reserves
-- an estimate; at the end it becomes what was measured. Units are whole µs, tokens and 1e-9 USD: see ratelimit/quotas.py.
-- A row has what it reserved in its field `charged`, in words without spaces, which older versions skip:
-- "est:<µs>:<tokens>:<USD per GPU second>:<USD per 1,000 tokens>" and "<name>:<window>:<units>" of each such quota.
-- The customer's hash has the mean GPU time of its requests in a pool, "<µs> <ms of the last change>", for an hour: a high mean
-- must not keep a customer out, whose refused requests cannot lower it.
-- NO_METER: of a gateway that did not know a quota yet. MEAN_SAMPLES: so many new costs replace a mean.
local metered = {NO_METER = {100000, 0, 0}, MEAN_MS = 3600000, MEAN_SAMPLES = 16}

-- metered.mean(text) -> µs, or nil if it is not known. metered.new_mean(known, sum_us, count) -> the text with `count` more costs.
function metered.mean(text)
  local mean, changed_at = string.match(text or '', '^(%d+) (%d+)$')
  return mean and now - changed_at < metered.MEAN_MS and tonumber(mean) or nil
end

function metered.new_mean(known, sum_us, count)
  local mean = sum_us / count
  if known then mean = known + (mean - known) * math.min(0.5, count / metered.MEAN_SAMPLES) end
  return string.format('%.0f %.0f', math.max(1, mean), now)
end

function metered.units(unit, gpu_us, tokens, usd_per_gpu_s, usd_per_1000)
  if unit == 'gpu' then return math.floor(gpu_us + 0.5) end
  if unit == 'tokens' then return math.floor(tokens + 0.5) end
  return math.floor(gpu_us * usd_per_gpu_s * 1e3 + tokens * usd_per_1000 * 1e6 + 0.5)
end

-- metered.gpu_us(c, meter): GPU time of a request in µs: the mean of its customer or, until that is known, what the gateway measured.
function metered.gpu_us(c, meter) return math.max(1, c.gpu_us or meter[1]) end

-- metered.cost(c, q, count, tokens, meter): units of a quota that `count` requests with so many tokens reserve.
function metered.cost(c, q, count, tokens, meter)
  return q.unit and metered.units(q.unit, count * metered.gpu_us(c, meter), tokens, meter[2], meter[3]) or count
end

-- metered.field(c, quotas, tokens, meter): what one request reserves, for its field `charged`.
function metered.field(c, quotas, tokens, meter)
  local words = {string.format('est:%.0f:%.0f:%.17g:%.17g', metered.gpu_us(c, meter), tokens, meter[2], meter[3])}
  for _, q in ipairs(quotas) do
    if q.unit then
      words[#words + 1] = string.format('%s:%.0f:%.0f', q.period, q.number, metered.cost(c, q, 1, tokens, meter))
    end
  end
  return table.concat(words, ' ')
end

metered.MOST_TOKENS = 1073741823 -- of one request, as in gpu_pool: a wrong count of a backend must not block a customer for ever

-- metered.settle(text, kept, gpu_us, tokens, give) -> the field with the final units: those of the measured values if the request
-- is `kept` charged, else 0. give(window, units) gets the difference of each quota, below 0 if more was used than reserved. A value
-- that was not measured stays as estimated.
function metered.settle(text, kept, gpu_us, tokens, give)
  local est_us, est_tokens, usd_per_gpu_s, usd_per_1000 = string.match(text, 'est:(%d+):(%d+):([^:%s]+):(%S+)')
  if not est_us then return text end
  gpu_us = gpu_us and math.floor(gpu_us + 0.5) or tonumber(est_us)
  tokens = tokens and math.min(tokens, metered.MOST_TOKENS) or tonumber(est_tokens)
  local settled = string.gsub(text, '(%d+%a+:(%a+)@?%w*):(%d+):(%d+)', function(name, unit, number, units)
    local final = kept and metered.units(unit, gpu_us, tokens, usd_per_gpu_s, usd_per_1000) or 0
    give(name .. ' ' .. number, units - final)
    return string.format('%s:%s:%.0f', name, number, final)
  end)
  return (string.gsub(settled, 'est:%d+:%d+', string.format('est:%.0f:%.0f', gpu_us, tokens)))
end
