"""Weights of customers and of their keys: parts of the GPU time while others wait too."""

from ledger.migration import run_sql_beside

revision = "0020_pre_customer_weight"
down_revision = "0019_pre_endpoint"


def upgrade() -> None:
    run_sql_beside(__file__)
