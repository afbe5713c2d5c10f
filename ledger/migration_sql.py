"""Runs the .sql file that stands beside a migration: SQL stays SQL, and the migration stays one line."""

from collections.abc import Iterator
from pathlib import Path

from alembic import op


def run_sql_beside(migration: str) -> None:
    """Run every statement of the file with the migration's name and the ending .sql, in order.

    `migration` is the caller's `__file__`.
    """
    connection = op.get_bind()
    for statement in split_statements(Path(migration).with_suffix(".sql").read_text(encoding="utf-8")):
        # The driver prepares what it runs, and only one statement at a time can be prepared.
        connection.exec_driver_sql(statement)


def split_statements(sql: str) -> Iterator[str]:
    """Split at lines that end in `;` outside of a `$$` body; comments stay with the statement below them."""
    lines: list[str] = []
    in_body = False
    for line in sql.splitlines():
        lines.append(line)
        in_body ^= line.count("$$") % 2 == 1
        if line.rstrip().endswith(";") and not in_body and not line.lstrip().startswith("--"):
            yield "\n".join(lines)
            lines = []
    if any(line.strip() and not line.lstrip().startswith("--") for line in lines):
        raise ValueError("the last SQL statement does not end with a semicolon")
