SELECT customer_id::text, tier, quota FROM quotas
