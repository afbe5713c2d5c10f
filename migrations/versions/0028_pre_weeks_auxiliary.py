"""Quotas of a week, and the limit on requests that run no model."""

from ledger.migration import run_sql_beside

revision = "0028_pre_weeks_auxiliary"
down_revision = "0027_pre_tpot"


def upgrade() -> None:
    run_sql_beside(__file__)
