#!lua flags=no-writes
-- limit_state: return what is left of one customer's limits; charges nothing.
-- KEYS[1] leases (routes the call). ARGV: 1 prefix, 2 customer id, 3 packed {{{kind, rate, size}...}, concurrency,
--   quotas}, 4 key id, 5 rate and 6 burst of the key's own limit (rate 0 = none), 7 packed kinds of buckets.
-- Returns packed `RemainingLimits`: {{{left, reset_ms}...}, requests in progress, {{quota left, quota reset_ms}...}}.
-- include: prelude, ratelimit/metered, ratelimit/bucket, ratelimit/quota, ratelimit/share, ratelimit/customer
bucket_kinds = cmsgpack.unpack(ARGV[7])
local key = tonumber(ARGV[5]) > 0 and bucket(T .. 'rl:key:' .. ARGV[4], tonumber(ARGV[5]), tonumber(ARGV[6])) or nil
local c = customer(ARGV[2], cmsgpack.unpack(ARGV[3]))
if c.in_use > 0 then count_leases(c) end
return cmsgpack.pack(remaining(c, key))
