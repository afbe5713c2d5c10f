"""Where the callbacks of one customer may go."""

from ledger.migration import run_sql_beside

revision = "0014_pre_callback_hosts"
down_revision = "0013_pre_fixed_rate"


def upgrade() -> None:
    run_sql_beside(__file__)
