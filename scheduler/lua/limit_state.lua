#!lua flags=no-writes
-- limit_state: what is left of one customer's limits. Nothing is charged.
-- KEYS[1] leases (routes the call). ARGV: 1 prefix, 2 customer id, 3 packed {{{number of the kind, rate, size}...}, concurrency,
--   quotas}, 4 key id, 5 rate and 6 burst of the key's own limit (rate 0 = it has none), 7 packed kinds of buckets.
-- Returns packed `RemainingLimits`: {{{left, reset_ms}...}, in use, {{quota left, quota reset_ms}...}}.
-- include: prelude, ratelimit/bucket, ratelimit/quota, ratelimit/customer
kinds = cmsgpack.unpack(ARGV[7])
local own = tonumber(ARGV[5]) > 0 and bucket('rl:key:' .. ARGV[4], tonumber(ARGV[5]), tonumber(ARGV[6])) or nil
local c = customer(ARGV[2], cmsgpack.unpack(ARGV[3]))
if c.used > 0 then recount(c) end
return remaining(c, own)
