"""A rate of each GPU that holds whatever is measured, where an admin says so."""

from ledger.migration import run_sql_beside

revision = "0013_pre_fixed_rate"
down_revision = "0012_pre_operations"


def upgrade() -> None:
    run_sql_beside(__file__)
