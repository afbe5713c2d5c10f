-- $1 pool, $2 most rows, $3 most of one host, $4 those that are being told, $5 most of one customer, $6 customers' hosts that
-- are paused, as `customer host`: ends that are to be told now, those first that were tried least. Of a host and of a customer
-- no more than are called for at once, so that one with many due does not hide the others.
SELECT id, customer_id::text, host, callback_url, callback_tries,
       extract(epoch FROM expires_at - clock_timestamp())::float8 AS left_s
FROM (
    SELECT *, row_number() OVER (PARTITION BY customer_id ORDER BY callback_tries, callback_at) AS place_of_customer
    FROM (
        SELECT *, row_number() OVER (PARTITION BY host ORDER BY callback_tries, callback_at) AS place_of_host
        FROM (
            SELECT id, customer_id, callback_url, callback_tries, callback_at, expires_at,
                   coalesce(lower(substring(callback_url FROM '://([^/?:[]*|\[[^]]*])')), '') AS host
            FROM jobs WHERE callback_at <= clock_timestamp() AND pool = $1 AND id <> ALL($4)
        ) AS due
        WHERE customer_id::text || ' ' || host <> ALL($6)
    ) AS due
    WHERE place_of_host <= $3
) AS due
WHERE place_of_customer <= $5
ORDER BY callback_tries, callback_at LIMIT $2
