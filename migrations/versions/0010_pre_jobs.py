"""Jobs: what is needed to queue them again after a loss, to tell their end elsewhere, and to audit them."""

from ledger.migration import run_sql_beside

revision = "0010_pre_jobs"
down_revision = "0009_pre_request_ids"


def upgrade() -> None:
    run_sql_beside(__file__)
