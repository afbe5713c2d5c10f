SELECT ensure_request_partitions($1)
