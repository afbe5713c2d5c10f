"""Rows of the comparison, for the screen, for a page, and as JSON."""
# ruff: noqa: INP001 - a folder of scripts, not a package

from collections.abc import Sequence
from typing import Any, NamedTuple

from measuring import Measured
from rich.table import Table

HEADERS = (
    "System",
    "Connections",
    "Requests/s",
    "p50",
    "p99",
    "CPU per request",
    "Idle p50",
    "Errors",
    "Processes",
    "Memory",
    "Besides",
    "Keys, tiers, audit",
)
MEBIBYTE = 1 << 20


class Row(NamedTuple):
    """One system; `failed` is the reason for missing figures."""

    name: str
    title: str
    connections: int
    measured: Measured | None = None
    failed: str = ""
    audit: str = "no"


def cells(row: Row) -> list[str]:
    """A row as text; without figures it has the reason."""
    if row.measured is None:
        return [row.title, str(row.connections), row.failed, *("-" for _ in HEADERS[3:])]
    load, memory = row.measured.counted.load, row.measured.memory
    size = memory.rss_bytes if memory.pss_bytes is None else memory.pss_bytes
    return [
        row.title,
        f"{row.connections:,}",
        f"{load.rate:,.0f}",
        f"{load.p50_us / 1000:.0f} ms",
        f"{load.p99_us / 1000:.0f} ms",
        f"{row.measured.counted.cpu_us:,.0f} us",
        f"{row.measured.idle.p50_us / 1000:.1f} ms",
        str(load.errors + row.measured.idle.errors),
        str(memory.processes),
        f"{size / MEBIBYTE:,.0f} MiB",
        f"{row.measured.counted.others_cores:.1f} cores",
        row.audit,
    ]


def screen(rows: Sequence[Row]) -> Table:
    """The table for a terminal."""
    table = Table(title="The same job on each")
    for header in HEADERS:
        table.add_column(header, justify="left" if header == HEADERS[0] else "right", overflow="fold")
    for row in rows:
        table.add_row(*cells(row))
    return table


def markdown(rows: Sequence[Row]) -> str:
    """The table in Markdown."""
    lines = [HEADERS, ["---", *("---:" for _ in HEADERS[1:-1]), "---"], *(cells(row) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def document(rows: Sequence[Row], about: dict[str, Any]) -> dict[str, Any]:
    """All figures for JSON."""
    return {**about, "rows": [_plain(row) for row in rows]}


def _plain(row: Row) -> dict[str, Any]:
    plain: dict[str, Any] = {"name": row.name, "says": row.title, "connections": row.connections}
    if row.measured is None:
        return {**plain, "failed": row.failed}
    measured = row.measured
    figures = {
        "requests_per_second": round(measured.counted.load.rate, 1),
        "cpu_us_per_request": round(measured.counted.cpu_us, 2),
        "load": measured.counted.load._asdict(),
        "idle": measured.idle._asdict(),
        "memory": measured.memory._asdict(),
        "others_cores": round(measured.counted.others_cores, 3),
        "attempts": measured.attempts,
        "audit": row.audit,
    }
    return {**plain, **figures}
