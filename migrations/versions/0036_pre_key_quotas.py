"""Quotas of API keys."""

from ledger.migration import run_sql_beside

revision = "0036_pre_key_quotas"
down_revision = "0035_pre_webhook_secrets"


def upgrade() -> None:
    run_sql_beside(__file__)
