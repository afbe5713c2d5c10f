"""The models that a customer and a key may use."""

from ledger.migration import run_sql_beside

revision = "0031_pre_allowed_models"
down_revision = "0030_pre_operators"


def upgrade() -> None:
    run_sql_beside(__file__)
