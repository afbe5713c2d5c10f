"""issue_api_key: an admin with nothing but psql can hand out a key."""

from ledger.migration import run_sql_beside

revision = "0004_pre_api_keys"
down_revision = "0003_pre_catalog_changes"


def upgrade() -> None:
    run_sql_beside(__file__)
