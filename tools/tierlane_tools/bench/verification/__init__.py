"""Verification of a run: outputs, request ids and audit rows."""
