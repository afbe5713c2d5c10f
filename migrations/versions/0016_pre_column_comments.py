"""Shorter comments of tables, columns, views and functions, from which docs/sql.md is generated."""

from ledger.migration import run_sql_beside

revision = "0016_pre_column_comments"
down_revision = "0014_pre_callback_hosts"


def upgrade() -> None:
    run_sql_beside(__file__)
