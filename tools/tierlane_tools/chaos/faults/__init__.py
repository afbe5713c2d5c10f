"""Faults of a chaos run: the catalogue, the targets and how each fault is injected."""
