"""Files and batches of OpenAI's batch API."""

from ledger.migration import run_sql_beside

revision = "0021_pre_batches"
down_revision = "0020_pre_customer_weight"


def upgrade() -> None:
    run_sql_beside(__file__)
