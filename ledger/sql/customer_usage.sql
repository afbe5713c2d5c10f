-- $1 customer. The last 24 hours, by the index on (customer_id, created_at).
SELECT count(*), count(*) FILTER (WHERE status = 'completed'), count(*) FILTER (WHERE status = 'failed'),
       coalesce(sum(tokens_used), 0)::bigint
FROM requests WHERE customer_id = $1 AND created_at > now() - interval '24 hours'
