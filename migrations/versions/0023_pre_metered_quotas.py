"""Quotas of GPU time, tokens and money; prices are part of the catalog."""

from ledger.migration import run_sql_beside

revision = "0023_pre_metered_quotas"
down_revision = "0022_pre_cost"


def upgrade() -> None:
    run_sql_beside(__file__)
