-- $1 days that dead letters are kept, $2 most to delete now.
DELETE FROM dead_letters WHERE id IN (
    SELECT id FROM dead_letters WHERE dead_at < now() - make_interval(days => $1) ORDER BY dead_at LIMIT $2
)
