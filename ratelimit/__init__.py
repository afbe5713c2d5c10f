"""May this enter now? Pure arithmetic (capacity, tier shares, slew) apart from enforcement (token buckets in Lua)."""
