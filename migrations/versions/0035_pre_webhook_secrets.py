"""The number of each customer's webhook secret, and the earlier ones that are still valid."""

from ledger.migration import run_sql_beside

revision = "0035_pre_webhook_secrets"
down_revision = "0034_pre_operator_sessions"


def upgrade() -> None:
    run_sql_beside(__file__)
