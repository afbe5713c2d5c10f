"""The three default tiers."""

from ledger.migration import run_sql_beside

revision = "0006_pre_default_tiers"
down_revision = "0005_pre_views"


def upgrade() -> None:
    run_sql_beside(__file__)
