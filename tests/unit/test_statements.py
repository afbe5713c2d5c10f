"""Named queries of the ledger."""

import re
from pathlib import Path

import pytest

from ledger import postgres
from ledger.postgres import statement

ROOT = Path(__file__).resolve().parents[2]


def test_every_query_is_used_and_every_used_query_exists() -> None:
    """Names in Python code and names in ledger/sql/ are the same."""
    code = [path.read_text("utf-8") for package in ("ledger", "tierlane") for path in (ROOT / package).rglob("*.py")]
    used = {name for text in code for name in re.findall(r'(?:statement\(|feed\(\w+, build\.\w+, )"(\w+)"', text)}

    assert used == postgres._statements().keys()


def test_a_missing_query_is_named() -> None:
    """The error contains the name."""
    with pytest.raises(LookupError, match="no_such_query"):
        statement("no_such_query")
