"""The tables, with their constraints, indexes and comments."""

from ledger.migration import run_sql_beside

revision = "0001_pre_tables"
down_revision = None


def upgrade() -> None:
    run_sql_beside(__file__)
