"""Operators of the admin API, with the hashes of their tokens."""

from ledger.migration import run_sql_beside

revision = "0030_pre_operators"
down_revision = "0029_pre_unused_cap"


def upgrade() -> None:
    run_sql_beside(__file__)
