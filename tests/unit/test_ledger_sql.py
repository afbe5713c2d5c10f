"""Named queries of the ledger, and the revision of the schema that a role accepts."""

import re
from pathlib import Path

import pytest

from ledger import postgres
from ledger.postgres import statement
from ledger.revision import head_revision, is_behind, migrations_dir

ROOT = Path(__file__).resolve().parents[2]


def test_every_query_is_used_and_every_used_query_exists() -> None:
    """Names in Python code and names in ledger/sql/ are the same; a missing one is named."""
    code = [path.read_text("utf-8") for package in ("ledger", "tierlane") for path in (ROOT / package).rglob("*.py")]
    used = {name for text in code for name in re.findall(r'(?:statement\(|feed\(\w+, build\.\w+, )"(\w+)"', text)}

    assert used == postgres._statements().keys()
    with pytest.raises(LookupError, match="no_such_query"):
        statement("no_such_query")


@pytest.mark.parametrize(
    ("revision", "behind"),
    [
        (None, True),  # never migrated
        (min(path.stem for path in (migrations_dir() / "versions").glob("0*.py")), True),
        (head_revision(), False),
        ("9999_of_a_newer_version", False),  # a rolling upgrade migrates first, while old roles are still running
    ],
)
def test_a_database_is_behind_or_not(revision: str | None, behind: bool) -> None:
    """A schema that is older than the installation is rejected, a newer one is accepted."""
    assert is_behind(revision) is behind
