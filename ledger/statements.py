"""SQL lives in ledger/sql, one file a statement; this reads them."""

from functools import cache
from importlib.resources import files


@cache
def statement(name: str) -> str:
    """The text of `ledger/sql/<name>.sql`. Raises FileNotFoundError for one that is not there."""
    return files("ledger").joinpath("sql", f"{name}.sql").read_text(encoding="utf-8")
