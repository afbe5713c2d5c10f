"""The checker of a chaos run: evidence, invariants, and what each fault excuses."""
