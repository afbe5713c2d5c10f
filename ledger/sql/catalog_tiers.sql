SELECT name, priority, guaranteed_share, :limits,
       max_queue_depth, max_queue_ms, shed_depth, shed_wait_ms, shadow, paused
FROM tiers ORDER BY priority
