-- $1 tier, $2 model, $3 error code (null: any; "": those of which it is not known), $4 newest number that was seen, $5 most.
DELETE FROM dead_letters WHERE id IN (
    SELECT id FROM dead_letters
    WHERE id <= $4
      AND ($1::text IS NULL OR coalesce(tier, '') = $1)
      AND ($2::text IS NULL OR coalesce(model, '') = $2)
      AND ($3::text IS NULL OR error_code = $3)
    LIMIT $5
)
RETURNING request_id
