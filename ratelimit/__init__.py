"""Rate limits: pure arithmetic (capacity, tier shares, slew), and their enforcement by token buckets in Lua."""
