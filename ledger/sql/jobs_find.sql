-- How these jobs stand; those whose time is over are not known any more, though their rows may still be there.
SELECT id, customer_id::text, status, output, error_code, pool
FROM jobs WHERE id = ANY($1) AND (expires_at IS NULL OR expires_at > clock_timestamp())
