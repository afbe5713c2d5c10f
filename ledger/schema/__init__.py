"""All tables. Their metadata is what alembic reads, and what the migrations are tested against."""

from ledger.schema import audit, batches, catalog
from ledger.schema.metadata import metadata

__all__ = ["audit", "batches", "catalog", "metadata"]
