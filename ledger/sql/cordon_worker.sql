-- $1 worker, $2 why. One that is cordoned already stays as it is, reason included.
INSERT INTO cordons (worker, reason) VALUES ($1, $2) ON CONFLICT (worker) DO NOTHING RETURNING true
