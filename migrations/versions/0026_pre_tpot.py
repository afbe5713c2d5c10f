"""An objective for the milliseconds per token of a model's answers."""

from ledger.migration import run_sql_beside

revision = "0026_pre_tpot"
down_revision = "0025_pre_cells"


def upgrade() -> None:
    run_sql_beside(__file__)
