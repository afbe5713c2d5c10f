-- $1 job, $2 seconds until it is tried again, null where it is not.
UPDATE jobs SET callback_tries = callback_tries + 1,
    callback_at = clock_timestamp() + make_interval(secs => $2)
WHERE id = $1
