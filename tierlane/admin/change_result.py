"""The result of a verb that changes rows, and its text."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from ledger.admin.changes import Change, Row
from tierlane.output import aligned, printable, readable

NUMBERS = frozenset({"webhook_secret", "webhook_secret_oldest"})
"""Columns with numbers of secrets, which say nothing about a new row."""


class ChangeResult(NamedTuple):
    """The changes of a verb; `secret` is a new key or token, to be shown once, `notes` are further sentences."""

    changes: Sequence[Change]
    secret: str | None = None
    notes: Sequence[str] = ()
    secret_name: str = "key"  # noqa: S105 - of the value


def result_lines(done: ChangeResult, *, dry_run: bool) -> list[str]:
    """The changes as text."""
    would, lines = "would be " if dry_run else "", list[str]()
    for change in done.changes:
        old, new, head = change.old, change.new, f"{change.thing} {printable(change.name)}"
        added, removed = f"{head}: {would}created", f"{head}: {would}deleted"
        if change.thing == "cordon":
            added, removed = (f"{printable(change.name)} {would}{verb}" for verb in ("cordoned", "uncordoned"))
        if old is None:
            values = {
                name: readable(value)
                for name, value in (new or {}).items()
                if value is not None and name not in NUMBERS
            }
            lines += [added, *aligned(values.items(), "  ")]
        elif new is None:
            lines.append(removed)
        elif old == new:
            lines.append(f"{head}: nothing to change")
        else:
            lines += [f"{head}: {would}changed", *aligned(changed_columns(old, new), "  ")]
    lines += [f"If applied: {note}" for note in done.notes] if dry_run and done.changes else done.notes
    if done.secret is not None:
        name = done.secret_name
        lines += ["", f"The {name}, shown only once:" if not dry_run else f"The {name} would be shown here, once."]
        lines += [done.secret, ""] if not dry_run else [""]
    if dry_run:
        return [*lines, "Dry run: nothing was changed."]
    applied = "This takes effect within one second."
    return [*lines, applied] if any(change.old != change.new for change in done.changes) else lines


def changed_columns(old: Row, new: Row) -> list[tuple[str, str]]:
    """Each changed column with its value before and after."""
    return [
        (name, f"{_exact(old.get(name))} -> {_exact(value)}") for name, value in new.items() if value != old.get(name)
    ]


def _exact(value: Any) -> str:
    """As in tables, but a float has its digits: two values that differ look different."""
    return f"{value:,}" if isinstance(value, float) and not value.is_integer() else readable(value)
