#!lua flags=no-writes
-- limit_state: return what is left of one customer's limits; charges nothing.
-- KEYS[1] leases (routes the call). ARGV: customer_id; packed_limits {{{kind, rate, size}...}, concurrency, quotas}; key_id;
--   key_rate and key_burst of the key's own limit (rate 0 = none); packed_kinds of buckets.
-- Returns packed `RemainingLimits`: {{{left, reset_ms}...}, requests in progress, {{quota left, quota reset_ms}...}}.
-- include: prelude, ratelimit/metered, ratelimit/bucket, ratelimit/quota, ratelimit/share, ratelimit/customer
bucket_kinds = cmsgpack.unpack(packed_kinds)
local key = key_rate > 0 and bucket(T .. 'rl:key:' .. key_id, key_rate, key_burst) or nil
local limits = cmsgpack.unpack(packed_limits)
local c = customer(customer_id, limits)
if c.in_use > 0 then count_leases(c) end
return cmsgpack.pack(remaining(c, key, quotas_of(c, limits)))
