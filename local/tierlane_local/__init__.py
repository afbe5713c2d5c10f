"""The local stack: embedded servers and `tierlane up`."""
