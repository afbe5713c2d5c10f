"""The endpoint of each request in the audit."""

from ledger.migration import run_sql_beside

revision = "0019_pre_endpoint"
down_revision = "0018_pre_responses"


def upgrade() -> None:
    run_sql_beside(__file__)
