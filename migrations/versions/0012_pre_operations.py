"""What on-call may stop: workers that are cordoned, tiers that are paused."""

from ledger.migration import run_sql_beside

revision = "0012_pre_operations"
down_revision = "0011_pre_shared_runs"


def upgrade() -> None:
    run_sql_beside(__file__)
