SELECT name, pool, max_batch_size, max_batch_tokens, max_wait_ms, gpu_timeout_ms, rps_per_gpu, target_utilization,
       cache_ttl_s, enabled, cache_scope, rps_per_gpu_fixed
FROM models ORDER BY name
