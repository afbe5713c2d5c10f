"""The catalog in an admin's hands: rows looked at and changed, each refusal of PostgreSQL told as one sentence."""
