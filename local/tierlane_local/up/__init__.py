"""`tierlane up`: the whole system on one machine, supervised by one process that leaves nothing behind."""
