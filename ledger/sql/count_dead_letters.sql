-- $1 ids, $2 least age in seconds; null: any.
SELECT count(*) FROM dead_letters
WHERE ($1::text[] IS NULL OR request_id = ANY ($1))
  AND ($2::double precision IS NULL OR dead_at <= now() - make_interval(secs => $2))
