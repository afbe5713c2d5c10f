"""models.gpu_timeout_ms is not used."""

from ledger.migration import run_sql_beside

revision = "0029_pre_unused_cap"
down_revision = "0028_pre_weeks_auxiliary"


def upgrade() -> None:
    run_sql_beside(__file__)
