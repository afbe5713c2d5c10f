"""Recovery after a loss in Redis."""
