"""Objectives of a tier: the p95 of its response time, and its share of successful requests."""

from ledger.migration import run_sql_beside

revision = "0015_pre_objectives"
down_revision = "0014_pre_callback_hosts"


def upgrade() -> None:
    run_sql_beside(__file__)
