-- $1 pool, $2 most rows: what has been kept long enough and is in the audit.
DELETE FROM jobs WHERE id IN (
    SELECT id FROM jobs WHERE expires_at <= clock_timestamp() AND audited AND pool = $1 ORDER BY expires_at LIMIT $2
)
