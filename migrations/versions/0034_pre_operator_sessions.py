"""Sessions of browsers in the admin API."""

from ledger.migration import run_sql_beside

revision = "0034_pre_operator_sessions"
down_revision = "0033_pre_quota_alerts"


def upgrade() -> None:
    run_sql_beside(__file__)
