"""Stored responses of /v1/responses."""

from ledger.migration import run_sql_beside

revision = "0018_pre_responses"
down_revision = "0017_pre_capabilities"


def upgrade() -> None:
    run_sql_beside(__file__)
