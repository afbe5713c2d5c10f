"""Every change of the catalog is counted, announced and written down."""

from ledger.migration import run_sql_beside

revision = "0003_pre_catalog_changes"
down_revision = "0002_pre_partitions"


def upgrade() -> None:
    run_sql_beside(__file__)
