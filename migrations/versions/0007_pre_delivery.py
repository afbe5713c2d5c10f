"""How a request was run, and whether its end was told to the client: columns of the audit."""

from ledger.migration import run_sql_beside

revision = "0007_pre_delivery"
down_revision = "0006_pre_default_tiers"


def upgrade() -> None:
    run_sql_beside(__file__)
