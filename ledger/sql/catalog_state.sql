-- What is there now, and the name of the snapshot of PostgreSQL in which it is looked at.
SELECT version, changed_at::text, whole_version, pg_current_snapshot()::text FROM catalog_version
