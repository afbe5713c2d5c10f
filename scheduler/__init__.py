"""The vocabulary and states of a request, the queue protocol in Redis, batch policy, dispatcher and reaper."""
