"""`tierlane dlq`: dead letters, looked at and dealt with by an operator."""
