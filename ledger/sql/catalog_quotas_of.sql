-- $1 ids of customers; all tiers' quotas are read with theirs. Columns as in catalog_quotas.
SELECT customer_id::text, tier, quota FROM quotas WHERE customer_id = ANY ($1::uuid[]) OR customer_id IS NULL
