"""One line of the check of a system: in which group, how it stands, what was seen, what to do. Pure."""

import textwrap
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from tierlane.output import printable

Level = Literal["pass", "warn", "fail"]
MARKS: dict[Level, str] = {"pass": "\u2713", "warn": "!", "fail": "\u2717"}
WIDTH = 110


GROUPS = ("settings", "postgresql", "redis", "catalog", "workers", "gateway", "audit")
"""In the order in which they are shown: one thing stands on those before it."""


class Item(NamedTuple):
    """`warn` does not fail the whole: something to know, or what could not be seen. `advice` is what to do."""

    group: str
    name: str
    level: Level
    said: str
    advice: str = ""


def ordered(items: Sequence[Item]) -> list[Item]:
    """By group, each in its own order."""
    return sorted(items, key=lambda item: GROUPS.index(item.group))


def passes(items: Sequence[Item]) -> bool:
    """Whether nothing failed."""
    return all(item.level != "fail" for item in items)


def lines_of(items: Sequence[Item]) -> list[str]:
    """For people: groups with their lines, and one line of status at the end."""
    lines: list[str] = []
    group = ""
    for item in ordered(items):
        if item.group != group:
            group = item.group
            lines += [*([""] if lines else []), group]
        lines.append(f"  {MARKS[item.level]} {item.name:<14} {printable(item.said)}")
        lines += textwrap.wrap(item.advice, WIDTH, initial_indent=" " * 19, subsequent_indent=" " * 19)
    return [*lines, "", status_line(items)]


def status_line(items: Sequence[Item]) -> str:
    """The whole in one line."""
    failed = sum(item.level == "fail" for item in items)
    warned = sum(item.level == "warn" for item in items)
    counts = f"{len(items)} checks, {failed} failed, {warned} with a warning"
    return f"Status check results are {MARKS['pass' if not failed else 'fail']} ({counts})"


def document(items: Sequence[Item]) -> dict[str, Any]:
    """For programs."""
    return {"ok": passes(items), "checks": [item._asdict() for item in ordered(items)]}
