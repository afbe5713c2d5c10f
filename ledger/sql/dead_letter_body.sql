SELECT body FROM dead_letters WHERE request_id = $1
