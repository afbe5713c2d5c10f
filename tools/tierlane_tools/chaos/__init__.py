"""`tierlane chaos`: faults in a stack under load, and a check of all guarantees."""
