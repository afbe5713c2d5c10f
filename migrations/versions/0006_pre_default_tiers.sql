INSERT INTO tiers
    (name, priority, guaranteed_share, requests_per_second, burst, max_concurrency, tokens_per_minute,
     max_queue_depth, max_queue_ms, shed_depth, shed_wait_ms)
VALUES
    ('enterprise', 1, 0.05, 5000, 5000, 2000, NULL, 20000, 2000, NULL, NULL),
    ('paid',       2, 0.25, 1000, 1000,  500, NULL, 10000, 2000,  500, 1500),
    ('free',       3, 0.10,  200,  200,  100, NULL,  5000, 2000,  100, 1000);
