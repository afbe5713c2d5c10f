"""The catalog of tiers, customers, keys and models, followed in PostgreSQL as immutable snapshots."""
