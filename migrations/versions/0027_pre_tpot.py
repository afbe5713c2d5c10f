"""An objective for the milliseconds per token of a model's answers."""

from ledger.migration import run_sql_beside

revision = "0027_pre_tpot"
down_revision = "0026_pre_request_times"


def upgrade() -> None:
    run_sql_beside(__file__)
