"""Cells, and the cells of single customers."""

from ledger.migration import run_sql_beside

revision = "0025_pre_cells"
down_revision = "0024_pre_interactive_jobs"


def upgrade() -> None:
    run_sql_beside(__file__)
