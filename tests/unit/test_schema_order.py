"""Which database a role may stand on."""

import pytest

from ledger.revision import head_revision, is_behind, migrations_dir


def oldest_revision() -> str:
    """The first migration of all, by its file's name."""
    return min(path.stem for path in (migrations_dir() / "versions").glob("0*.py"))


@pytest.mark.parametrize(
    ("revision", "behind"),
    [
        (None, True),  # never migrated
        (oldest_revision(), True),
        (head_revision(), False),
        ("9999_of_a_newer_version", False),  # a rolling upgrade migrates first; old roles go on meanwhile
    ],
)
def test_a_database_is_behind_or_not(revision: str | None, behind: bool) -> None:
    """Older than this installation is refused; newer is borne."""
    assert is_behind(revision) is behind
