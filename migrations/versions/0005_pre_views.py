"""Views for admins: effective limits, usage by the hour, service levels by tier."""

from ledger.migration import run_sql_beside

revision = "0005_pre_views"
down_revision = "0004_pre_api_keys"


def upgrade() -> None:
    run_sql_beside(__file__)
