"""The last outcome of a callback."""

from ledger.migration import run_sql_beside

revision = "0037_pre_callback_status"
down_revision = "0036_pre_key_quotas"


def upgrade() -> None:
    run_sql_beside(__file__)
