"""Every table of Tierlane: the metadata that alembic reads and the migrations are tested against."""

from ledger.schema.audit import dead_letters, jobs, requests
from ledger.schema.catalog import api_keys, catalog_version, config_changes, cordons, customers, models, quotas, tiers
from ledger.schema.metadata import metadata

__all__ = [
    "api_keys",
    "catalog_version",
    "config_changes",
    "cordons",
    "customers",
    "dead_letters",
    "jobs",
    "metadata",
    "models",
    "quotas",
    "requests",
    "tiers",
]
