"""The worker process: claim, run and finish batches, heartbeat, direct endpoint."""
