"""The output of verbs: tables, JSON, numbers and times, and text without control characters."""

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any, NamedTuple

import msgspec
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

_encode = msgspec.json.Encoder(decimal_format="number").encode
WIDE = 400  # Width of output to a file or a program, so that no cell is wrapped.
_STYLES = {"suspended": "yellow", "revoked": "red", "expired": "red"}


class Column(NamedTuple):
    """A column of a table: the field of the rows, and its heading; `whole`: a value is not wrapped."""

    field: str
    heading: str
    whole: bool = False


def named(*fields: str) -> tuple[Column, ...]:
    """Columns whose headings are the names of the fields."""
    return tuple(Column(field, field.upper().replace("_", " ")) for field in fields)


def print_json(value: object) -> None:
    """Print JSON, with times in ISO 8601."""
    typer.echo(msgspec.json.format(_encode(value), indent=2).decode())


def print_rows(
    output: str, columns: Sequence[Column], rows: Sequence[dict[str, Any]], noun: str, total: int | None = 0
) -> None:
    """Print rows as a table or as JSON; `total` is the number of all rows, if only some are printed, None if it is unknown."""
    if output == "json":
        print_json(rows)
    elif rows:
        print_table(columns, rows)
    else:
        typer.echo(f"No {noun}.")
    if total is None:
        typer.echo(f"{len(rows):,} of more {noun}; --limit N shows more.", err=True)
    elif len(rows) < total:
        typer.echo(f"{len(rows):,} of {total:,} {noun}; --limit N shows more.", err=True)


def print_table(columns: Sequence[Column], rows: Sequence[dict[str, Any]]) -> None:
    """Print rows as a table; numbers are on the right."""
    console = Console(highlight=False)
    if not console.is_terminal:  # Lines are neither wrapped nor padded.
        console.width = WIDE
    table = Table(box=None, pad_edge=False)
    for column in columns:
        values = [row[column.field] for row in rows if row[column.field] is not None]
        numbers = all(isinstance(value, int | float | Decimal) and not isinstance(value, bool) for value in values)
        table.add_column(column.heading, justify="right" if numbers else "left", overflow="fold", no_wrap=column.whole)
    for row in rows:
        texts = ["-" if row[column.field] is None else readable(row[column.field]) for column in columns]
        table.add_row(*(Text(text, style=_STYLES.get(text, "")) for text in texts))
    with console.capture() as capture:
        console.print(table)
    lines = [line.rstrip() for line in capture.get().splitlines()]
    typer.echo("\n".join(lines), color=True)  # Rich has decided on colours.


def aligned(pairs: Iterable[tuple[str, str]], indent: str = "") -> list[str]:
    """Lines with a name and a value, in two columns."""
    pairs = list(pairs)
    width = max((len(name) for name, _ in pairs), default=0)
    return [f"{indent}{name:<{width}}  {value}".rstrip() for name, value in pairs]


def readable(value: object) -> str:
    """A value as text: numbers with commas, times in UTC, `none`, on and off."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, int | float | Decimal):
        return f"{int(value):,}" if float(value).is_integer() else _rounded(value)
    if isinstance(value, datetime):
        return f"{value.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"
    if isinstance(value, list):
        return ", ".join(readable(item) for item in value) or "none"
    return printable(str(value))


def _rounded(value: float | Decimal) -> str:
    """One digit after the point from 100, two from 1, else three significant digits; JSON and decimals have all digits."""
    if isinstance(value, Decimal):
        return f"{value:,f}"
    if abs(value) < 1:
        return f"{value:.3g}"
    return f"{value:,.{1 if abs(value) >= 100 else 2}f}".rstrip("0").rstrip(".")


def printable(text: str, keep: str = "") -> str:
    """The text with control characters escaped, except those in `keep`, so that a terminal does not execute them."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text)


def counted(count: int, noun: str) -> str:
    """The number and the noun, such as `1 key` or `2 keys`."""
    return f"1 {noun}" if count == 1 else f"{count:,} {noun}s"
