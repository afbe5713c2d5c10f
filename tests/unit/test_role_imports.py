"""What a role imports until it serves: nothing that takes long and is of no use to it."""

import subprocess
import sys

import pytest

PROBE = """
import sys
from tierlane.cli import _role
import tierlane.settings.model
_role({role!r})
import ledger.revision
print(*(name for name in {heavy!r} if name in sys.modules))
import rich, gc
assert gc.isenabled()
"""
HEAVY = ("alembic", "sqlalchemy", "rich", "opentelemetry.sdk.metrics", "torch", "transformers")


@pytest.mark.parametrize("role", ["gateway", "scheduler", "worker"])
def test_a_role_starts_without_what_it_does_not_use(role: str) -> None:
    """Neither migrations' libraries nor what others import where it is installed; afterwards all can be imported."""
    probe = PROBE.format(role=role, heavy=HEAVY)

    found = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=False)

    assert (found.stdout.split(), found.stderr) == ([], "")
