"""Redis clients: connections, pipelined calls, scripts and keys."""
