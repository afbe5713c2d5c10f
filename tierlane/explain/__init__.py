"""`tierlane explain`: a customer's limits taken apart, why a request was refused, or what became of it."""
