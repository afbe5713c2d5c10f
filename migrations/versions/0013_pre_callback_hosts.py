"""Where the callbacks of one customer may go."""

from ledger.migration_sql import run_sql_beside

revision = "0013_pre_callback_hosts"
down_revision = "0012_pre_operations"


def upgrade() -> None:
    run_sql_beside(__file__)
