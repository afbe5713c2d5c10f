"""Jobs that wait as interactive requests, in the tiers that allow them."""

from ledger.migration import run_sql_beside

revision = "0024_pre_interactive_jobs"
down_revision = "0023_pre_metered_quotas"


def upgrade() -> None:
    run_sql_beside(__file__)
