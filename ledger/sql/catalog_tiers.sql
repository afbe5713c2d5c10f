SELECT name, priority, guaranteed_share, requests_per_second, burst, max_concurrency, tokens_per_minute,
       max_queue_depth, max_queue_ms, shed_depth, shed_wait_ms, shadow, paused
FROM tiers ORDER BY priority
