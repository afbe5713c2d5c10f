"""`tierlane top`: reads the health of a gateway each second and draws it; `q` or Ctrl-C ends it."""

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import aiohttp
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from tierlane.connect import VerbError, no_local_stack
from tierlane.operate.gateway_client import GatewayAddress, advised_reasons, gateway_of, read_health
from tierlane.output import WIDE, printable
from tierlane.settings.model import Settings, SettingsError

STYLES = {"healthy": "green", "degraded": "yellow", "down": "red"}
OLD_S = 2.5  # The age from which a document is shown as old.

EVERY_S = 1.0
MOST_CODES = 5
"""Error codes of a tier, the most frequent ones."""


class TopState(NamedTuple):
    """The last health document of a gateway, if any, its time in monotonic seconds, and the last error."""

    url: str
    document: Mapping[str, Any] | None = None
    at_s: float = 0.0
    problem: str | None = None


def frame(seen: TopState, now_s: float) -> RenderableType:
    """The view at `now_s`, monotonic seconds."""
    parts: list[RenderableType] = []
    if seen.problem is not None:
        parts.append(Text(printable(seen.problem), style="red"))
    if seen.document is None:
        return Group(*parts)
    if seen.problem is not None or now_s - seen.at_s > OLD_S:
        parts.append(Text(f"The data below is {now_s - seen.at_s:.0f} s old.", style="red"))
    tiers = _rows(seen.document.get("tiers"))
    parts += [*_status(seen.document), Text(), _tiers(tiers)]
    errors = {name: named for name, tier in tiers.items() if (named := _errors(tier))}
    if errors:
        parts += [Text(), Text("Errors of the last minute", style="bold")]
        parts += [Text(f"{printable(name)}: {named}") for name, named in errors.items()]
    return Group(*parts, Text(), _pools(_rows(seen.document.get("pools")) or {"all": seen.document}))


def _status(document: Mapping[str, Any]) -> list[RenderableType]:
    status = printable(str(document.get("status", "unknown")))
    installation = printable(str(document.get("installation") or ""))
    line = Text.assemble(
        (f"tierlane {installation} " if installation else "tierlane ", "bold"),
        (status, STYLES.get(status, "red")),
        f"   {_number(document, 'requests_per_second', 1)} requests/s of {_number(document, 'capacity_rps', 1)}",
        f"   {_number(document, 'queue_depth')} waiting",
        f"   dead letters {_number(document, 'dlq')}",
        f"   audit lag {_number(document, 'audit_lag_ms')} ms",
    )
    parts: list[RenderableType] = [line]
    for advised in advised_reasons(document):
        parts.append(Padding(Text(printable(advised.reason)), (0, 0, 0, 2)))
        texts = filter(None, (advised.action, advised.runbook))
        parts += [Padding(Text(printable(text), style="dim"), (0, 0, 0, 4)) for text in texts]
    return parts


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
    table = _table("POOL", "GPUS", "BUSY", "RUNNING", "CAPACITY RPS", "WAITING", "PADDING", "NOT HEALTHY")
    for name, pool in pools.items():
        healthy, total = pool.get("healthy_gpus"), pool.get("total_gpus")
        table.add_row(
            printable(name),
            Text(
                f"{_number(pool, 'healthy_gpus')}/{_number(pool, 'total_gpus')}",
                style="" if healthy == total else "yellow",
            ),
            _share(pool, "gpu_utilization"),
            f"{_number(pool, 'running')}/{_number(pool, 'slots')}" if pool.get("slots") else "-",
            _number(pool, "capacity_rps", 1),
            _number(pool, "queue_depth"),
            _share(pool, "padding_waste"),
            _causes(pool),
        )
    return table


def _table(first: str, *others: str) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column(first)
    for heading in others:
        table.add_column(heading, justify="right")
    return table


def _rows(value: object) -> dict[str, Mapping[str, Any]]:
    """The objects of a value by name; empty if it is not an object."""
    return {str(k): v for k, v in value.items() if isinstance(v, dict)} if isinstance(value, dict) else {}


def _number(row: Mapping[str, Any], field: str, digits: int = 0) -> str:
    value = row.get(field)
    return f"{value:,.{digits}f}" if isinstance(value, int | float) else "-"


def _causes(pool: Mapping[str, Any]) -> str:
    """The GPUs that are not healthy, by cause; a gateway of an older version does not report them."""
    found = pool.get("unhealthy_gpus")
    if not isinstance(found, dict) or not found:
        return "-"
    return ", ".join(f"{number} {printable(str(cause))}" for cause, number in found.items())


def _errors(tier: Mapping[str, Any]) -> str:
    """The errors of the last minute by code, the most frequent first; a gateway of an older version does not report them."""
    found = tier.get("errors_60s")
    counts = {k: v for k, v in found.items() if isinstance(v, int) and v} if isinstance(found, dict) else {}
    codes = sorted(counts, key=lambda code: (-counts[code], code))
    left = sum(counts[code] for code in codes[MOST_CODES:])
    named = [f"{counts[code]:,} {printable(str(code))}" for code in codes[:MOST_CODES]]
    return ", ".join([*named, *([f"{left:,} others"] if left else [])])


def _share(row: Mapping[str, Any], field: str) -> str:
    value = row.get(field)
    return f"{value:.0%}" if isinstance(value, int | float) else "-"


def watch(settings: Settings, url: str | None, *, once: bool) -> int:
    """Show frames until `q` or Ctrl-C, or a single one; return the exit code. Raises SettingsError without a gateway."""
    gateway = gateway_of(settings, url)
    if gateway is None:
        raise SettingsError(
            "--url: is not set, and "
            + no_local_stack(settings.data_dir, "set it, start `tierlane up`, or set --data-dir to that of the stack")
        )
    console = Console(highlight=False)
    single = once or not console.is_terminal
    return asyncio.run(_single(gateway, console) if single else _live(gateway, console))


async def _single(gateway: GatewayAddress, console: Console) -> int:
    if not console.is_terminal:
        console.width = min(WIDE, 120)
    async with aiohttp.ClientSession() as session:
        seen = await _look(session, gateway, TopState(gateway.url))
    console.print(frame(seen, time.monotonic()))
    return 0 if seen.problem is None else 1


async def _live(gateway: GatewayAddress, console: Console) -> int:
    stop, seen = asyncio.Event(), TopState(gateway.url)
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, stop.set)
    with _keys(stop), Live(console=console, screen=True, auto_refresh=False) as live:
        async with aiohttp.ClientSession() as session:
            while not stop.is_set():
                seen = await _look(session, gateway, seen)
                live.update(frame(seen, time.monotonic()), refresh=True)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(EVERY_S):
                        await stop.wait()
    return 0


async def _look(session: aiohttp.ClientSession, gateway: GatewayAddress, before: TopState) -> TopState:
    """The new state; on an error, the state before with the error."""
    try:
        return TopState(gateway.url, await read_health(session, gateway), time.monotonic())
    except VerbError as error:
        return before._replace(problem=str(error))


@contextmanager
def _keys(stop: asyncio.Event) -> Iterator[None]:
    """In the block, the key `q` sets `stop`; afterwards the terminal is restored."""
    if not sys.stdin.isatty():
        yield
        return
    import termios  # noqa: PLC0415 - only with a terminal
    import tty  # noqa: PLC0415

    inside, loop = sys.stdin.fileno(), asyncio.get_running_loop()
    before = termios.tcgetattr(inside)
    tty.setcbreak(inside)

    def pressed() -> None:
        if b"q" in os.read(inside, 64).lower():
            stop.set()

    loop.add_reader(inside, pressed)
    try:
        yield
    finally:
        loop.remove_reader(inside)
        termios.tcsetattr(inside, termios.TCSADRAIN, before)
