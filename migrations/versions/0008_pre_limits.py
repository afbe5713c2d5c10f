"""Limits of one key, tiers on trial, token limits by default; and what is needed to read only what changed."""

from ledger.migration import run_sql_beside

revision = "0008_pre_limits"
down_revision = "0007_pre_delivery"


def upgrade() -> None:
    run_sql_beside(__file__)
