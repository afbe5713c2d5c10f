"""The centre: a request's vocabulary and states, the queue protocol in Redis, batch policy, the reaper."""
