"""The GPU time that each request pays, and prices of models."""

from ledger.migration import run_sql_beside

revision = "0022_pre_cost"
down_revision = "0021_pre_batches"


def upgrade() -> None:
    run_sql_beside(__file__)
