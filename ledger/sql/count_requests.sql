SELECT status, count(*) FROM requests GROUP BY status
