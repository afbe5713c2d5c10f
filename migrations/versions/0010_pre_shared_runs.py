"""Equal requests that share a run: among whom, and which they were."""

from ledger.migration_sql import run_sql_beside

revision = "0010_pre_shared_runs"
down_revision = "0009_pre_request_ids"


def upgrade() -> None:
    run_sql_beside(__file__)
