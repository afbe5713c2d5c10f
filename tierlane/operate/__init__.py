"""Verbs on the running system: `tierlane gpu`, `queue`, `dlq` and `top`."""
