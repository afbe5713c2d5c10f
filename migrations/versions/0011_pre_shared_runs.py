"""Equal requests that share a run: among whom, and which they were."""

from ledger.migration import run_sql_beside

revision = "0011_pre_shared_runs"
down_revision = "0010_pre_jobs"


def upgrade() -> None:
    run_sql_beside(__file__)
