"""`tierlane simulate`: the real policies in virtual time, on a scenario or on recorded requests."""
