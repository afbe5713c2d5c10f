"""`python -m ledger`: generate docs/sql.md from the table definitions and the migrations, without a server."""

import re
from pathlib import Path

from sqlalchemy import Table, make_url

from ledger.schema import metadata
from ratelimit.__main__ import Pages, update

MIGRATIONS = Path(__file__).parent.parent / "migrations" / "versions"
DIALECT = make_url("postgresql+asyncpg://").get_dialect()()
_COMMENT = re.compile(r"^COMMENT ON (VIEW|FUNCTION) (.+?) IS\s+'((?:[^']|'')*)';", re.MULTILINE)
_USED = ("issue_api_key", "ensure_request_partitions")
"""The functions that administrators call; triggers and other functions call the rest."""
_NAMES = ("_at", "customer_id")
"""Endings of names of columns whose type the head of the page says."""
_INTERNAL = {"catalog_version", "idempotency", "fingerprint", "audited", "xact", "gpu_timeout_ms"}
"""Names of a table and of columns that only Tierlane reads, or nothing."""
_TYPES = {"TIMESTAMP WITH TIME ZONE": "timestamptz", "DOUBLE PRECISION": "double", "TEXT": ""}


def pages() -> Pages:
    """Tables, views and functions."""
    found = [match for path in sorted(MIGRATIONS.glob("*.sql")) for match in _COMMENT.findall(path.read_text("utf-8"))]
    comments = {name: text.replace("''", "'") for kind, name, text in found if kind == "VIEW" or name.startswith(_USED)}
    others = "".join(f"* `{name}`: {text}\n" for name, text in comments.items())
    return {"sql.md": {"tables": "".join(map(_table, metadata.tables.values())), "views and functions": others}}


def _table(table: Table) -> str:
    if table.name in _INTERNAL:
        return f"\n### {table.name}\n\n{table.comment}\n"
    tables = list(metadata.tables.values())
    known = {(column.name, column.comment) for other in tables[: tables.index(table)] for column in other.c}
    text, same = f"\n### {table.name}\n\n{table.comment}\n\n", []
    for column in table.c:
        if column.name in _INTERNAL:
            continue
        if (column.name, column.comment) in known:
            same.append(f"`{column.name}`")
            continue
        type_ = column.type.compile(dialect=DIALECT)
        shown = "" if column.name.endswith(_NAMES) else _TYPES.get(type_, type_.lower())
        words = f"`{column.name}` {shown}".rstrip()
        text += f"* {words}: {(column.comment or '').replace('<', '&lt;')}\n"
    return text + (f"* {', '.join(same)}: as in a table above.\n" if same else "")


if __name__ == "__main__":
    update(pages())
