#!lua flags=no-writes
-- limit_state: return the remaining limits of one customer without charging them.
-- KEYS[1] leases (routes the call). ARGV: 1 prefix, 2 customer id, 3 packed {rate, burst, tokens per minute, concurrency,
--   quotas} as for admit, 4 key id, 5 rate and 6 burst of the key's own limit (rate 0: none).
-- Returns packed {remaining, reset_ms, tokens left, tokens reset_ms, in use, {{quota left, quota reset_ms}...}}.
-- include: prelude, ratelimit/bucket, ratelimit/quota, ratelimit/customer, judging
local key = tonumber(ARGV[5]) > 0 and bucket('rl:key:' .. ARGV[4], tonumber(ARGV[5]), tonumber(ARGV[6])) or nil
local c = customer(ARGV[2], cmsgpack.unpack(ARGV[3]))
if c.used > 0 then recount(c) end
local left, reset_ms, budget, budget_ms, used, quotas = standing(c, key)
return cmsgpack.pack({left, reset_ms, budget, budget_ms, used, quotas or {}})
