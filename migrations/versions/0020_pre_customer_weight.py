"""The part of a tier's GPU time that a customer gets while others of the tier wait, in proportion to their weights."""

from ledger.migration import run_sql_beside

revision = "0020_pre_customer_weight"
down_revision = "0019_pre_endpoint"


def upgrade() -> None:
    run_sql_beside(__file__)
