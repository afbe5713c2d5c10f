-- $1 key ids, $2 their last uses. Touches no column that the catalog's triggers watch.
UPDATE api_keys AS k SET last_used_at = used.at
FROM unnest($1::text[], $2::timestamptz[]) AS used (id, at)
WHERE k.id = used.id AND (k.last_used_at IS NULL OR k.last_used_at < used.at)
