"""The hands: pull a batch, run the model in a child process, finish, heartbeat. The only package that imports torch."""
