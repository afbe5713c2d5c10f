"""What customers read and change of their own account: jobs and keys."""

from ledger.migration import run_sql_beside

revision = "0032_pre_account"
down_revision = "0031_pre_allowed_models"


def upgrade() -> None:
    run_sql_beside(__file__)
