UPDATE jobs SET attempts = attempts + 1 WHERE id = ANY($1) AND status IN ('queued', 'processing')
