"""Waits by the kind of a pool's backend, and caps of up to an hour."""

from ledger.migration import run_sql_beside

revision = "0026_pre_request_times"
down_revision = "0025_pre_cells"


def upgrade() -> None:
    run_sql_beside(__file__)
