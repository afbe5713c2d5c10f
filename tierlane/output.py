"""What verbs print: tables, JSON, numbers and times, and text from outside made harmless for a terminal."""

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

import msgspec
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

WIDE = 400  # Columns of output that goes to a file or a program: nothing is cut off there.
_STYLES = {"suspended": "yellow", "revoked": "red", "expired": "red"}


class Column(NamedTuple):
    """A column of a table: the field of the rows, and its heading."""

    field: str
    heading: str


def print_json(value: object) -> None:
    """Print for programs; times in ISO 8601."""
    typer.echo(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


def print_rows(
    output: str, columns: Sequence[Column], rows: Sequence[dict[str, Any]], what: str, total: int = 0
) -> None:
    """Print a list as a table or as JSON; `total` is how many `what` there are, where some were left out."""
    if output == "json":
        print_json(rows)
    elif rows:
        _print_table(columns, rows)
    else:
        typer.echo(f"No {what}.")
    if len(rows) < total:
        typer.echo(f"{len(rows):,} of {total:,} {what}; --limit N shows more.", err=True)


def aligned(pairs: Iterable[tuple[str, str]], indent: str = "") -> list[str]:
    """Lines of names and values, the values below each other."""
    pairs = list(pairs)
    width = max((len(name) for name, _ in pairs), default=0)
    return [f"{indent}{name:<{width}}  {value}".rstrip() for name, value in pairs]


def readable(value: object) -> str:
    """One value for people: numbers with commas, times in UTC, `none`, on and off."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, int | float):
        return f"{int(value):,}" if float(value).is_integer() else f"{value:,}"
    if isinstance(value, datetime):
        return f"{value.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"
    if isinstance(value, list):
        return ", ".join(readable(one) for one in value) or "none"
    return printable(str(value))


def printable(text: str) -> str:
    """Text from outside, made harmless for a terminal: control characters are shown, not obeyed."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _print_table(columns: Sequence[Column], rows: Sequence[dict[str, Any]]) -> None:
    # Numbers to the right; nothing is cut off, nor padded, where no terminal shows it.
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = WIDE
    table = Table(box=None, pad_edge=False)
    for field, heading in columns:
        numbers = all(row[field] is None or _is_number(row[field]) for row in rows)
        table.add_column(heading, justify="right" if numbers else "left", overflow="fold")
    for row in rows:
        table.add_row(*(_cell(row[column.field]) for column in columns))
    with console.capture() as drawn:
        console.print(table)
    typer.echo("\n".join(line.rstrip() for line in drawn.get().splitlines()), color=True)  # Rich chose already.


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _cell(value: object) -> Text:
    shown = "-" if value is None else readable(value)
    return Text(shown, style=_STYLES.get(shown, ""))
