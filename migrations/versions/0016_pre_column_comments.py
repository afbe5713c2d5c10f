"""Shorter comments of tables, columns, views and functions, from which docs/sql.md is generated."""

from ledger.migration import run_sql_beside

revision = "0016_pre_column_comments"
down_revision = "0015_pre_objectives"


def upgrade() -> None:
    run_sql_beside(__file__)
