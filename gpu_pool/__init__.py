"""The worker: claims a batch, runs the model in a child process, finishes the batch, sends heartbeats. Only here torch is imported."""
