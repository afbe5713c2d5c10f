-- $1 beginning of the window, $2 its end, $3 customers, $4 error codes of failures that are charged all the same.
SELECT customer_id::text, count(*)
FROM requests
WHERE customer_id = ANY ($3::uuid[]) AND created_at >= $1 AND created_at < $2
  AND (status <> 'failed' OR error_code = ANY ($4::text[])
       OR (error_code = 'deadline_exceeded' AND tokens_used > 0)) -- A stream of which a part was delivered.
GROUP BY customer_id
