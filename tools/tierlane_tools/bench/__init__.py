"""`tierlane bench`: open-loop load over tiers, and what came back. It trusts nothing that the system says of itself."""
