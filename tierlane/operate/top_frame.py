"""One frame of `tierlane top`, from what a gateway said of the whole. Pure: a document in, something to print out."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tierlane.output import printable

STYLES = {"healthy": "green", "degraded": "yellow", "down": "red"}
OLD_S = 2.5  # From here on what is shown is not of now.


class Seen(NamedTuple):
    """The last health document of a gateway (None: there was none yet), when it came, and why there is no newer one.

    `at_s` is monotonic seconds.
    """

    url: str
    document: Mapping[str, Any] | None = None
    at_s: float = 0.0
    problem: str | None = None


def frame(seen: Seen, now_s: float) -> RenderableType:
    """What is shown at `now_s`, monotonic seconds."""
    parts: list[RenderableType] = [*_away(seen, now_s)]
    if seen.document is not None:
        parts += [*_status(seen.document), Text(), _tiers(_rows(seen.document.get("tiers")))]
        pools = _rows(seen.document.get("pools")) or {"all": seen.document}
        parts += [Text(), _pools(pools)]
    return Group(*parts)


def _away(seen: Seen, now_s: float) -> list[RenderableType]:
    lines: list[RenderableType] = []
    if seen.problem is not None:
        lines.append(Text(printable(seen.problem), style="red"))
    if seen.document is not None and (seen.problem is not None or now_s - seen.at_s > OLD_S):
        lines.append(Text(f"What follows is {now_s - seen.at_s:.0f} s old.", style="red"))
    return lines


def _status(document: Mapping[str, Any]) -> list[RenderableType]:
    status = printable(str(document.get("status", "unknown")))
    line = Text.assemble(
        ("tierlane ", "bold"),
        (status, STYLES.get(status, "red")),
        f"   {_number(document, 'requests_per_second', 1)} requests/s of {_number(document, 'capacity_rps', 1)}",
        f"   {_number(document, 'queue_depth')} waiting",
        f"   dead letters {_number(document, 'dlq')}",
        f"   audit lag {_number(document, 'audit_lag_ms')} ms",
    )
    reasons = document.get("reasons")
    return [line, *(Text(f"  {printable(str(reason))}") for reason in (reasons if isinstance(reasons, list) else []))]


def _tiers(tiers: Mapping[str, Mapping[str, Any]]) -> Table:
    table = _table("TIER", "DEPTH", "OLDEST MS", "LIMITS", "GIVEN RPS", "SHED/S", "P95 MS")
    for name, tier in tiers.items():
        ratio = tier.get("effective_limit_ratio")
        limits = f"{ratio:.0%}" if isinstance(ratio, int | float) else "-"
        table.add_row(
            printable(name),
            _number(tier, "depth"),
            _number(tier, "oldest_ms"),
            Text(limits, style="yellow" if limits not in ("100%", "-") else ""),
            _number(tier, "allocated_rps", 1),
            _number(tier, "shed_per_second", 1),
            _number(tier, "p95_ms"),
        )
    return table


def _pools(pools: Mapping[str, Mapping[str, Any]]) -> Table:
    table = _table("POOL", "GPUS", "BUSY", "CAPACITY RPS", "WAITING", "PADDING")
    for name, pool in pools.items():
        healthy, total = pool.get("healthy_gpus"), pool.get("total_gpus")
        table.add_row(
            printable(name),
            Text(
                f"{_number(pool, 'healthy_gpus')}/{_number(pool, 'total_gpus')}",
                style="" if healthy == total else "yellow",
            ),
            _share(pool, "gpu_utilization"),
            _number(pool, "capacity_rps", 1),
            _number(pool, "queue_depth"),
            _share(pool, "padding_waste"),
        )
    return table


def _table(first: str, *others: str) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column(first)
    for heading in others:
        table.add_column(heading, justify="right")
    return table


def _rows(value: object) -> dict[str, Mapping[str, Any]]:
    """Objects by name, as far as there are some."""
    return {str(k): v for k, v in value.items() if isinstance(v, dict)} if isinstance(value, dict) else {}


def _number(row: Mapping[str, Any], field: str, digits: int = 0) -> str:
    value = row.get(field)
    return f"{value:,.{digits}f}" if isinstance(value, int | float) else "-"


def _share(row: Mapping[str, Any], field: str) -> str:
    value = row.get(field)
    return f"{value:.0%}" if isinstance(value, int | float) else "-"
