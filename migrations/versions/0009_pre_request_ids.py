"""The check of an audit row's id, said so that it costs a third."""

from ledger.migration import run_sql_beside

revision = "0009_pre_request_ids"
down_revision = "0008_pre_limits"


def upgrade() -> None:
    run_sql_beside(__file__)
