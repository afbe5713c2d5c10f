"""Quotas of GPU time, tokens and money, with the prices and the cost of requests from which they are counted."""

from ledger.migration import run_sql_beside

revision = "0023_pre_metered_quotas"
down_revision = "0020_pre_customer_weight"


def upgrade() -> None:
    run_sql_beside(__file__)
