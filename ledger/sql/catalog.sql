-- The configuration tables, read into a snapshot (ledger/catalog/loader.py, ledger/catalog/changes.py).

-- name: catalog_state
SELECT version, changed_at::text, whole_version, pg_current_snapshot()::text FROM catalog_version

-- name: catalog_changes
-- $1: pg_snapshot of the previous read. $2: row limit. Returns the changes that are visible now and were not visible in $1.
-- The upper bound on xact ignores transaction ids of another server, from a restored dump. Changes of dead letters
-- and operators are recorded in the same table but are not part of the catalog.
SELECT table_name, old ->> 'id', new ->> 'id',
       coalesce(old ->> 'customer_id', new ->> 'customer_id'), coalesce(new ->> 'customer_id', old ->> 'customer_id'),
       coalesce(old ->> 'tier', new ->> 'tier') IS NOT NULL
FROM config_changes
WHERE xact >= pg_snapshot_xmin($1::text::pg_snapshot)::text::bigint
  AND xact < pg_snapshot_xmax(pg_current_snapshot())::text::bigint
  AND table_name NOT IN ('dead_letters', 'operators')
  AND NOT pg_visible_in_snapshot(xact::text::xid8, $1::text::pg_snapshot)
LIMIT $2

-- name: catalog_tiers
SELECT name, priority, guaranteed_share, :limits,
       max_queue_depth, max_queue_ms, shed_depth, shed_wait_ms, shadow, paused,
       slo_ms, slo_success, interactive_jobs, auxiliary_requests_per_second, auxiliary_burst
FROM tiers ORDER BY priority

-- name: catalog_models
SELECT name, pool, max_batch_size, max_batch_tokens, max_wait_ms, rps_per_gpu, target_utilization,
       cache_ttl_s, enabled, cache_scope, rps_per_gpu_fixed, string_to_array(capabilities, ','), tpot_ms
FROM models ORDER BY name

-- name: catalog_prices
-- The latest first; those of the future are included.
SELECT model, extract(epoch FROM valid_from)::double precision, usd_per_gpu_s::double precision,
       usd_per_1000_tokens::double precision
FROM prices ORDER BY model, valid_from DESC

-- name: catalog_cordons
-- With the actor of the last change, "" if it is not among the last 100,000: this bounds the search.
SELECT worker, reason, coalesce((
    SELECT changed_by FROM config_changes
    WHERE table_name = 'cordons' AND row_key = worker AND id > (SELECT max(id) FROM config_changes) - 100000
    ORDER BY id DESC LIMIT 1
), '')
FROM cordons

-- name: catalog_cells
SELECT name, redis_url, state, weight FROM cells ORDER BY name

-- name: catalog_quotas
SELECT customer_id::text, tier, quota, alert_shares FROM quotas

-- name: catalog_quotas_of
-- $1: customer ids. The quotas of all tiers are included. Columns as in catalog_quotas.
SELECT customer_id::text, tier, quota, alert_shares FROM quotas WHERE customer_id = ANY ($1::uuid[]) OR customer_id IS NULL

-- name: catalog_customers
-- Limits that the customer does not override are null. The loader takes them from the tier, and checks that it exists.
SELECT id::text, name, tier, status = 'suspended', :limits,
       max_queue_ms, callback_hosts, weight, cell, spread, models, time_zone, alert_url
FROM customers

-- name: catalog_customers_of
-- $1: customer ids. Columns as in catalog_customers.
SELECT id::text, name, tier, status = 'suspended', :limits,
       max_queue_ms, callback_hosts, weight, cell, spread, models, time_zone, alert_url
FROM customers WHERE id = ANY ($1::uuid[])

-- name: catalog_keys
-- Revoked keys are included, so that they get the same error as unknown keys while PostgreSQL is not available.
SELECT id, customer_id::text, secret_hash, extract(epoch FROM expires_at)::double precision, revoked_at IS NOT NULL,
       requests_per_second, burst, weight, models, quotas, coalesce(quota_key, id)
FROM api_keys

-- name: catalog_keys_of
-- $1: key ids. $2: customer ids; all keys of these are included. Columns as in catalog_keys.
SELECT id, customer_id::text, secret_hash, extract(epoch FROM expires_at)::double precision, revoked_at IS NOT NULL,
       requests_per_second, burst, weight, models, quotas, coalesce(quota_key, id)
FROM api_keys WHERE id = ANY ($1::text[]) OR customer_id = ANY ($2::uuid[])
