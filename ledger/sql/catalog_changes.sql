-- $1 name of the snapshot that was looked at before, $2 most rows. What can be seen now and could not be seen then.
-- A number from the future came with a dump from another server. Dead letters are no part of the catalog.
SELECT table_name, old ->> 'id', new ->> 'id',
       coalesce(old ->> 'customer_id', new ->> 'customer_id'), coalesce(new ->> 'customer_id', old ->> 'customer_id'),
       coalesce(old ->> 'tier', new ->> 'tier') IS NOT NULL
FROM config_changes
WHERE xact >= pg_snapshot_xmin($1::text::pg_snapshot)::text::bigint
  AND xact < pg_snapshot_xmax(pg_current_snapshot())::text::bigint
  AND table_name <> 'dead_letters'
  AND NOT pg_visible_in_snapshot(xact::text::xid8, $1::text::pg_snapshot)
LIMIT $2
