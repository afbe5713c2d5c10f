-- $1 pool, $2 most rows: ends that are to be told now, those first that were tried least.
SELECT id, status, output, error_code, callback_url, callback_tries,
       extract(epoch FROM expires_at - clock_timestamp())::float8 AS left_s
FROM jobs WHERE callback_at <= clock_timestamp() AND pool = $1
ORDER BY callback_tries, callback_at LIMIT $2
