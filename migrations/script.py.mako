"""${message}

Revision: ${up_revision}, after ${down_revision | comma,n}. Name it `NNNN_pre_<what>` when it must run before the new
code starts, `NNNN_post_<what>` when it must wait until the old code is gone.
"""

from alembic import op
import sqlalchemy as sa
${imports if imports else ""}
revision = ${repr(up_revision)}
down_revision = ${repr(down_revision)}
branch_labels = ${repr(branch_labels)}
depends_on = ${repr(depends_on)}


def upgrade() -> None:
    ${upgrades if upgrades else "pass"}


def downgrade() -> None:
    raise NotImplementedError("Tierlane's migrations only go forward; restore a backup instead.")
