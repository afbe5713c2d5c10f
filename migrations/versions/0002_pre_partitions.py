"""Day partitions of the audit: the default one, and the function that makes the others ahead."""

from ledger.migration import run_sql_beside

revision = "0002_pre_partitions"
down_revision = "0001_pre_tables"


def upgrade() -> None:
    run_sql_beside(__file__)
