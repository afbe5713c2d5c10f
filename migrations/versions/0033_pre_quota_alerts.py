"""Alerts at shares of quotas, and calendar periods in the time zone of the customer."""

from ledger.migration import run_sql_beside

revision = "0033_pre_quota_alerts"
down_revision = "0032_pre_account"


def upgrade() -> None:
    run_sql_beside(__file__)
