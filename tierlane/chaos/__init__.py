"""`tierlane chaos`: faults on a stack under load, and a table that says whether anything was lost by them."""
