"""What the server behind a model can do, for requests that are passed on to it."""

from ledger.migration import run_sql_beside

revision = "0017_pre_capabilities"
down_revision = "0016_pre_column_comments"


def upgrade() -> None:
    run_sql_beside(__file__)
