"""The child process that runs the model, and its supervision by the worker."""
