"""How an admin verb runs: values from the command line, one connection, one transaction for a change, and its output.

Ranges of values are checked by the tables.
"""

import asyncio
import getpass
import os
import re
from collections.abc import Awaitable, Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import typer

from ledger.admin.changes import Change, Row, changing
from ledger.admin.errors import BadValue, ChangeRejected, in_sentence
from ledger.catalog.api_key import NewKey
from ledger.postgres import Connection
from ratelimit.limits import LIMIT_COLUMNS
from tierlane.admin.options import REQUIRED, Field, Given, VerbCall, Work
from tierlane.connect import UsageError, VerbError, database
from tierlane.output import Column, aligned, print_json, print_rows, printable, readable
from tierlane.settings.declaration import flag

T = TypeVar("T")
APPLICATION = "tierlane-admin"
MOST_ACTOR_CHARS = 200
_SHORT = {
    "requests_per_second": "rps",
    "_per_second": "/s",
    "_per_minute": "/min",
    "_per_hour": "/h",
    "max_": "",
    "_": " ",
}
"""Parts of the names of limits as headings of columns have them."""


def _heading(name: str) -> str:
    for part, short in _SHORT.items():
        name = name.replace(part, short)
    return name.upper()


LIMITS = tuple(Column(limit.name, _heading(limit.name)) for limit in LIMIT_COLUMNS)
"""The columns of the limits of a tier or a customer."""


class ChangeResult(NamedTuple):
    """The changes of a verb; `key` is a new key, to be shown once, `notes` are further sentences."""

    changes: Sequence[Change]
    key: NewKey | None = None
    notes: Sequence[str] = ()


def run_verb(work: Work, call: VerbCall) -> int:
    """Run a verb; return the exit code. Raises UsageError and VerbError."""

    async def run() -> int:
        return await work(call)

    try:
        return asyncio.run(run())
    except BadValue as error:
        raise UsageError(printable(str(error))) from error
    except ChangeRejected as error:
        raise VerbError(printable(str(error))) from error


async def fetch(call: VerbCall, read: Callable[[Connection], Awaitable[T]]) -> T:
    """Call `read` with a connection."""
    async with database(call.settings, APPLICATION) as connection:
        return await read(connection)


def show_rows(
    read: Callable[[Connection], Awaitable[tuple[list[Row], int]]], columns: Sequence[Column], noun: str
) -> Work:
    """Print rows; `read` also returns how many rows there are in all, 0 if it returned all of them."""

    async def work(call: VerbCall) -> int:
        rows, total = await fetch(call, read)
        print_rows(call.output, columns, rows, noun, total)
        return 0

    return work


async def apply(call: VerbCall, change: Callable[[Connection], Awaitable[ChangeResult]]) -> int:
    """Make a change, or roll it back with --dry-run, and print it. Returns the exit code."""
    actor = actor_of(call)
    async with database(call.settings, APPLICATION) as connection, changing(connection, actor, dry_run=call.dry_run):
        done = await change(connection)
    if call.output == "json":
        document: dict[str, object] = {
            "dry_run": call.dry_run,
            "changes": [each._asdict() for each in done.changes],
        }
        if done.key is not None:
            document["key"] = None if call.dry_run else done.key.text
        print_json(document)
    else:
        typer.echo("\n".join(lines_of(done, dry_run=call.dry_run)))
    return 0


def actor_of(call: VerbCall) -> str:
    """The name for config_changes: --actor, or the user of this machine. Raises UsageError if it is not a name."""
    actor = (call.actor if call.actor is not None else _os_user()).strip()
    if not 0 < len(actor) <= MOST_ACTOR_CHARS or not actor.isprintable():
        raise UsageError(f"--actor: must be a name of 1 to {MOST_ACTOR_CHARS} printable characters, got {actor!r}")
    return actor


def lines_of(done: ChangeResult, *, dry_run: bool) -> list[str]:
    """The changes as text."""
    lines = [line for change in done.changes for line in _lines_of(change, "would be " if dry_run else "")]
    lines += [f"If applied: {note}" for note in done.notes] if dry_run and done.changes else done.notes
    if done.key is not None:
        lines += ["", "The key, shown only once:" if not dry_run else "The key would be shown here, once."]
        lines += [done.key.text, ""] if not dry_run else [""]
    if dry_run:
        return [*lines, "Dry run: nothing was changed."]
    applied = "This takes effect within one second."
    return [*lines, applied] if any(change.old != change.new for change in done.changes) else lines


def _lines_of(change: Change, would: str) -> list[str]:
    old, new = change.old, change.new
    head = f"{change.thing} {printable(change.name)}"
    if old is None:
        new = new or {}
        return [f"{head}: {would}created", *aligned(((k, readable(v)) for k, v in new.items() if v is not None), "  ")]
    if new is None:
        return [f"{head}: {would}deleted"]
    if old == new:
        return [f"{head}: nothing to change"]
    return [f"{head}: {would}changed", *aligned(steps_of(old, new), "  ")]


def steps_of(old: Row, new: Row) -> list[tuple[str, str]]:
    """Each changed column with its value before and after."""
    return [
        (name, f"{_exact(old.get(name))} -> {_exact(value)}") for name, value in new.items() if value != old.get(name)
    ]


def _exact(value: Any) -> str:
    """As in tables, but a float has its digits: two values that differ look different."""
    return f"{value:,}" if isinstance(value, float) and not value.is_integer() else readable(value)


def one_of(first_name: str, first: str | None, second_name: str, second: str | None) -> str | None:
    """The one of two values that was given. Raises UsageError if they differ."""
    if first is not None and second is not None and first != second:
        raise UsageError(f"Specify {first_name} or {second_name}, not both.")
    return second if first is None else first


def _os_user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # A container may have no name for its user.
        return f"uid {os.getuid()}"


_SPAN = re.compile(r"([1-9][0-9]{0,5})([smhdw])")
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}
LONGEST = timedelta(days=36_500)


def values_of(fields: Sequence[Field], given: Given) -> dict[str, Any]:
    """The given fields by column. Raises UsageError."""
    return {field.name: _value(field, text) for field in fields if (text := given.get(field.name)) is not None}


def changes_of(fields: Sequence[Field], given: Given) -> dict[str, Any]:
    """The given fields of an existing row. Raises UsageError if there is none."""
    values = values_of(fields, given)
    if not values:
        raise UsageError(f"Specify at least one column: {_named(fields, 'or')}.")
    return values


def new_row(fields: Sequence[Field], given: Given) -> dict[str, Any]:
    """The given fields of a new row. Raises UsageError if a required one is missing."""
    missing = [field for field in fields if field.default == REQUIRED and given.get(field.name) is None]
    if missing:
        raise UsageError(f"Required: {_named(missing, 'and')}.")
    return values_of(fields, given)


def duration(option: str, text: str) -> timedelta:
    """A duration such as 24h or 30d. Raises UsageError."""
    form = _SPAN.fullmatch(text)
    if form is None:
        raise UsageError(f"{option}: must be a number and s, m, h, d or w, such as 24h or 30d, got {text!r}")
    length = timedelta(**{_UNITS[form[2]]: int(form[1])})
    if length > LONGEST:
        raise UsageError(f"{option}: must be at most {LONGEST.days}d, got {text!r}")
    return length


def _value(field: Field, text: str) -> Any:
    if field.none and text == "none":
        return None
    must_be, parse = _KINDS[field.kind]
    try:
        return parse(text)
    except (ValueError, KeyError):
        must_be += " or none" if field.none else ""
        meaning = in_sentence(field.says)
        raise UsageError(f"{flag(field.name)}: must be {must_be}, got {text!r} ({meaning})") from None


# Numbers are shown with commas, so they are accepted with commas.
_KINDS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "whole": ("a whole number", lambda text: int(text.replace(",", ""))),
    "decimal": ("a number", lambda text: float(text.replace(",", ""))),
    "switch": ("on or off", {"on": True, "off": False}.__getitem__),
    "text": ("a name", str),
}


def _named(fields: Iterable[Field], joint: str) -> str:
    *names, last = [flag(field.name) for field in fields]
    return f"{', '.join(names)} {joint} {last}" if names else last
