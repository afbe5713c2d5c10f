"""`tierlane check`: checks every server and component, group by group. One that is unavailable is reported, not fatal.

Figures are fetched here and judged by pure functions (`judge_*`); each line says how it is, what was seen, and what to
do.
"""

import asyncio
import textwrap
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import aiohttp
import typer
from msgspec.structs import replace

from ledger.admin.effects import SET_SECRET, UNSIGNED, Finding, rows_without_effect
from ledger.admin.rows import rows_to_judge
from ledger.catalog.loader import count_callback_customers, read_cells, read_models, read_tiers
from ledger.catalog.quotas import BadCatalogRow
from ledger.catalog.snapshot import CellRow, Model, Tier
from ledger.dead_letters import count_letters
from ledger.postgres import AWAY, SharedSession, closing, connect, is_behind_pooler, place_of, reason
from ledger.revision import current_revision, head_revision, is_behind
from ratelimit.request_limits import limits_of_workers
from scheduler.cells.places import cell_urls
from scheduler.errors import StartError
from scheduler.protocol.pool_view import Observation
from scheduler.redis_client.connections import MINIMUM_VERSION, bounded, measure
from scheduler.redis_client.distance import too_far
from scheduler.redis_client.keys import DEFAULT_CELL, pools_of
from tierlane.admin.runner import deployment_of
from tierlane.check.model_times import limits_line
from tierlane.connect import CONNECT_TIMEOUT_S, STATEMENT_TIMEOUT_MS, VerbError, database
from tierlane.operate.cells import redis_at
from tierlane.operate.gateway_client import advised_reasons, gateway_of, is_ready, read_health
from tierlane.operate.pools import Places, observe
from tierlane.output import print_json, printable
from tierlane.settings.model import Settings, SettingsError

Level = Literal["pass", "warn", "fail"]
MARKS: dict[Level, str] = {"pass": "\u2713", "warn": "!", "fail": "\u2717"}
WIDTH = 110

WITHOUT_EFFECT = "rows without effect"
GROUPS = ("settings", "postgresql", "redis", "catalog", WITHOUT_EFFECT, "workers", "gateway", "audit")
"""In the order in which they are shown: one thing stands on those before it."""

MOST_SKEW_MS = 100.0
FAR_MS = 30.0
"""From this round trip to Redis on, it is most of the time of a short request."""

STALE_AUDIT_MS = 10_000
NAME = "tierlane-check"
PATIENCE_S = 2.0


class CheckItem(NamedTuple):
    """`warn` does not fail the whole: something to know, or what could not be seen. `advice` is what to do."""

    group: str
    name: str
    level: Level
    said: str
    advice: str = ""


def ordered(items: Sequence[CheckItem]) -> list[CheckItem]:
    """By group, each in its own order."""
    return sorted(items, key=lambda item: GROUPS.index(item.group))


def passes(items: Sequence[CheckItem]) -> bool:
    """Whether nothing failed."""
    return all(item.level != "fail" for item in items)


def lines_of(items: Sequence[CheckItem]) -> list[str]:
    """For people: groups with their lines, and one line of status at the end."""
    lines: list[str] = []
    group = ""
    for item in ordered(items):
        if item.group != group:
            group = item.group
            lines += [*([""] if lines else []), group]
        lines.append(f"  {MARKS[item.level]} {item.name:<14} {printable(item.said)}")
        for paragraph in item.advice.splitlines():
            lines += textwrap.wrap(printable(paragraph), WIDTH, initial_indent=" " * 19, subsequent_indent=" " * 19)
    failed, warned = [sum(item.level == level for item in items) for level in ("fail", "warn")]
    counts = f"{len(items)} checks, {failed} failed, {warned} with a warning"
    return [*lines, "", f"Status check results are {MARKS['fail' if failed else 'pass']} ({counts})"]


def document(items: Sequence[CheckItem]) -> dict[str, Any]:
    """For programs."""
    return {"ok": passes(items), "checks": [item._asdict() for item in ordered(items)]}


def judged(
    group: str, name: str, said: str, advice: str, *, holds: bool, otherwise: Literal["warn", "fail"] = "fail"
) -> CheckItem:
    """A line that passes if it `holds`; else it has `advice`."""
    return CheckItem(group, name, "pass", said) if holds else CheckItem(group, name, otherwise, said, advice)


def judge_redis(info: Mapping[str, object]) -> list[CheckItem]:
    """The version, the mode, and whether it may throw work away; `info` is what INFO says."""
    text = str(info.get("redis_version", "unknown"))
    version = tuple(int(part) for part in text.split(".")[:2] if part.isdigit())
    policy = str(info.get("maxmemory_policy", "unknown"))
    cluster = str(info.get("cluster_enabled", 0)) != "0"
    eviction, kept = "It can evict queued work: set it to noeviction.", policy == "noeviction"
    needed = "Tierlane needs Redis 7.0 or Valkey 7.2."
    return [
        judged("redis", "version", text, needed, holds=version >= MINIMUM_VERSION),
        CheckItem("redis", "mode", "pass", "a cluster: all keys are in one slot" if cluster else "it holds all keys"),
        judged("redis", "eviction", f"maxmemory-policy {policy}", eviction, holds=kept),
    ]


def judge_distance(round_trip_s: float) -> CheckItem:
    """Whether the round trip to Redis is within the bound of the limits that follow it."""
    round_trip_ms = 1000 * round_trip_s
    said, advice = (
        f"round trip {round_trip_ms:.1f} ms",
        "Each request needs several round trips: run the roles near Redis.",
    )
    if problem := too_far(round_trip_s):
        return CheckItem("redis", "distance", "fail", said, f"{problem} Run the roles near Redis.")
    return judged("redis", "distance", said, advice, holds=round_trip_ms < FAR_MS, otherwise="warn")


def judge_clock(group: str, skew_ms: float, round_trip_ms: float) -> CheckItem:
    """How far a server's clock is from this machine's; half of the round trip is what cannot be known."""
    said = f"{skew_ms:+.0f} ms from this machine, within {round_trip_ms / 2:.0f} ms"
    advice = f"Have both follow NTP: more than {MOST_SKEW_MS:.0f} ms makes times of requests wrong."
    return judged(group, "clock", said, advice, holds=abs(skew_ms) - round_trip_ms / 2 <= MOST_SKEW_MS)


def judge_migrations(revision: str | None, head: str, *, behind: bool) -> CheckItem:
    """Whether the schema is the one that this installation needs."""
    name, said = "migrations", f"at {revision}, which is newer than {head}"
    if behind:
        return CheckItem("postgresql", name, "fail", f"at {revision or 'none'}, not {head}", "Run `tierlane migrate`.")
    if revision != head:
        return CheckItem("postgresql", name, "warn", said, "Upgrade this installation.")
    return CheckItem("postgresql", name, "pass", f"at {head}")


def judge_writable(name: str, read_only: str) -> CheckItem:
    """Whether rows can be written; `read_only` is the setting transaction_read_only."""
    if read_only == "off":
        return CheckItem("postgresql", name, "pass", "writable")
    advice = "Name the primary, or all servers: postgresql://host1,host2/tierlane?target_session_attrs=primary."
    said = "read-only: it is a standby, or has default_transaction_read_only"
    return CheckItem("postgresql", name, "fail", said, advice)


def judge_tiers(rows: Sequence[Tier]) -> list[CheckItem]:
    """The rows are valid for gateways; paused tiers are reported."""
    named = ", ".join(f"{tier.name} ({tier.guaranteed_share:g})" for tier in rows)
    paused = [tier.name for tier in rows if tier.paused]
    items = [CheckItem("catalog", "tiers", "pass", f"{named}: shares of the capacity that are guaranteed")]
    if paused:
        advice = "`tierlane queue resume TIER` lets its requests run again."
        items.append(CheckItem("catalog", "paused", "warn", f"paused: {', '.join(paused)}", advice))
    return items


def judge_models(rows: Collection[Model]) -> CheckItem:
    """Whether a model is enabled."""
    enabled = ", ".join(sorted(model.name for model in rows if model.enabled))
    advice = "Add one: `tierlane model create NAME`."
    return judged("catalog", "models", enabled or "none is enabled", advice, holds=bool(enabled))


def judge_pools(rows: Collection[Model], seen: Mapping[str, Observation]) -> list[CheckItem]:
    """Whether each pool that an enabled model names has a healthy worker."""
    items = []
    for pool in sorted(pools_of(rows) & seen.keys()):
        look = seen[pool]
        cordoned = ", ".join(worker.id for worker in look.workers if worker.status == "cordoned")
        advice = f"Cordoned: {cordoned}." if cordoned else "`tierlane gpu list` shows which."
        if not look.healthy_gpus:
            advice = f"Start a worker with TIERLANE_POOL={pool}, or see the logs of those that there are; `tierlane gpu list`."
        said = f"{look.healthy_gpus} of {look.total_gpus} workers are healthy"
        healthy = look.healthy_gpus > 0 and look.healthy_gpus >= look.total_gpus
        level: Literal["warn", "fail"] = "warn" if look.healthy_gpus else "fail"
        items.append(judged("workers", f"pool {pool}", said, advice, holds=healthy, otherwise=level))
    return items


def judge_gateway(document: Mapping[str, object]) -> list[CheckItem]:
    """The health of a gateway: `down` fails, `degraded` is a warning; its reasons and their actions are the advice."""
    status, lag = document.get("status"), document.get("audit_lag_ms")
    why = "\n".join(" ".join(filter(None, each)) for each in advised_reasons(document))
    items = [CheckItem("gateway", "health", "fail", str(status), why)]
    if status in ("healthy", "degraded"):
        items = [CheckItem("gateway", "health", "pass" if status == "healthy" else "warn", str(status), why)]
    if not isinstance(lag, int):
        items.append(CheckItem("audit", "lag", "warn", "not known"))
    elif lag > STALE_AUDIT_MS:
        items.append(CheckItem("audit", "lag", "fail", f"{lag:,} ms", "Is a scheduler running, and PostgreSQL up?"))
    else:
        items.append(CheckItem("audit", "lag", "pass", f"{lag:,} ms"))
    return items


def judge_callbacks(customers: int, *, can_sign: bool) -> list[CheckItem]:
    """Whether the callbacks that `customers` may have can be signed."""
    if can_sign or not customers:
        return []
    hosts = f"{customers:,} customers have" if customers > 1 else "1 customer has"
    said = f"{UNSIGNED}: {hosts} callback hosts; gateways that have it send their callbacks, others reject callback_url"
    advice = SET_SECRET
    return [CheckItem("catalog", "callbacks", "warn", said, advice)]


def judge_effects(findings: Sequence[Finding]) -> list[CheckItem]:
    """One line for each kind of rows that have no effect, with the first such row."""
    kinds: dict[str, dict[str, Finding]] = {}
    for finding in findings:
        kinds.setdefault(finding.kind, {}).setdefault(finding.said, finding)
    items = []
    for kind, (first, *others) in ((kind, list(found.values())) for kind, found in kinds.items()):
        said = f"{first.said} {len(others):,} more of this kind." if others else first.said
        items.append(CheckItem(WITHOUT_EFFECT, kind, "warn", said, first.advice))
    return items or [CheckItem(WITHOUT_EFFECT, "rows", "pass", "none")]


def judge_dead_letters(count: int) -> CheckItem:
    """Whether requests were given up for good."""
    advice = "`tierlane dlq list` shows them; requeue or purge them."
    said = f"{count:,}" if count else "none"
    return judged("audit", "dead letters", said, advice, holds=not count, otherwise="warn")


def check_system(settings: Settings, url: str | None, output: str) -> int:
    """Print what was found; the exit code is 0 where nothing failed."""

    async def work() -> int:
        items = await look(settings, url)
        if output == "json":
            print_json(document(items))
        else:
            typer.echo("\n".join(lines_of(items)))
        return 0 if passes(items) else 1

    return asyncio.run(work())


async def look(settings: Settings, url: str | None) -> list[CheckItem]:
    """All lines, in no particular order."""
    items = [CheckItem("settings", "readable", "pass", f"PostgreSQL at {place_of(settings.database_url)}")]
    if not settings.redis_url:
        items.append(
            CheckItem("settings", "redis_url", "fail", "TIERLANE_REDIS_URL is not set", "Every role needs it.")
        )
    items += await _postgresql(settings)
    models: list[Model] = []
    cells: list[CellRow] = []
    try:  # The rows, as gateways would read them.
        async with database(settings, NAME) as connection:
            found = judge_tiers(await read_tiers(connection))
            models += (await read_models(connection)).values()
            cells += await read_cells(connection)
            found += judge_callbacks(await count_callback_customers(connection), can_sign=bool(settings.callback_key))
            items += [*found, judge_models(models), judge_dead_letters(await count_letters(connection))]
            deployment = deployment_of(settings)._replace(can_sign=True)  # `judge_callbacks` has reported it.
            items += judge_effects(rows_without_effect(await rows_to_judge(connection), deployment))
    except BadCatalogRow as error:
        advice = "Correct the row: gateways keep the last good picture."
        items.append(CheckItem("catalog", "rows", "fail", str(error), advice))
    except VerbError:
        items.append(CheckItem("catalog", "rows", "warn", "not seen"))
    if settings.redis_url:
        items += await _cells(settings, models, cell_urls(settings.redis_url, cells))
    return items + await _gateway(settings, url)


async def _postgresql(settings: Settings) -> list[CheckItem]:
    advice = "Is it up, and is {} its address?"
    try:
        async with database(settings, NAME) as connection:
            items = [CheckItem("postgresql", "reachable", "pass", await connection.fetchval("SHOW server_version"))]
            pid = await connection.fetchval("SELECT pg_backend_pid()")
            said = "connections are to PostgreSQL itself"
            if is_behind_pooler(connection, pid):
                said = "a pooler keeps the session of each connection"
            items.append(CheckItem("postgresql", "sessions", "pass", said))
            items.append(judge_writable("writable", await connection.fetchval("SHOW transaction_read_only")))
            began = time.time()
            server_s = float(await connection.fetchval("SELECT extract(epoch FROM clock_timestamp())"))
            ended = time.time()
            items.append(judge_clock("postgresql", (server_s - (began + ended) / 2) * 1000, (ended - began) * 1000))
        revision = await current_revision(settings.session_url)
    except (VerbError, StartError) as error:
        if isinstance(error.__cause__, SharedSession):
            return [CheckItem("postgresql", "sessions", "fail", f"{reason(error.__cause__)}.")]
        variable = "TIERLANE_DATABASE_DIRECT_URL" if settings.database_direct_url else "TIERLANE_DATABASE_URL"
        return [CheckItem("postgresql", "reachable", "fail", str(error), advice.format(variable))]
    if settings.database_direct_url:  # Then there is a pooler beside it.
        url = settings.statement_url
        try:
            pooled = await connect(
                url, name=NAME, connect_timeout_s=CONNECT_TIMEOUT_S, statement_timeout_ms=STATEMENT_TIMEOUT_MS
            )
            async with closing(pooled):
                items.append(judge_writable("pooler", await pooled.fetchval("SHOW transaction_read_only")))
        except AWAY as error:
            said = f"PostgreSQL through {place_of(url)} cannot be used: {reason(error)}."
            items.append(CheckItem("postgresql", "pooler", "fail", said, advice.format("TIERLANE_DATABASE_URL")))
    return [*items, judge_migrations(revision, head_revision(), behind=is_behind(revision))]


async def _cells(settings: Settings, models: list[Model], urls: Mapping[str, str]) -> list[CheckItem]:
    """The Redis of each cell, and the workers of each pool in all cells."""
    items: list[CheckItem] = []
    seen: dict[str, Observation] = {}
    for cell, url in urls.items():
        found = await _redis(settings, url, cell, models, seen)
        items += found if cell == DEFAULT_CELL else [each._replace(name=f"{cell} {each.name}") for each in found]
    limits = [
        CheckItem("workers", f"limits of {pool}", "pass", limits_line(found.workers[0].backend, of_backend, settings))
        for pool, found in sorted(seen.items())
        if found.workers
        for of_backend in [limits_of_workers(found.workers)]
    ]
    return items + judge_pools(models, seen) + limits


async def _redis(
    settings: Settings, url: str, cell: str, models: list[Model], seen: dict[str, Observation]
) -> list[CheckItem]:
    """One Redis; `seen` gets what is observed of each pool there."""
    try:
        async with redis_at(url) as client:
            distance = judge_distance(await measure(client))
            async with bounded(PATIENCE_S):
                info = await client.info()
            items = [CheckItem("redis", "reachable", "pass", "it answers"), distance, *judge_redis(info)]
            began = time.time()
            async with bounded(PATIENCE_S):
                seconds, micros = await client.time()
            ended = time.time()
            skew_s = seconds + micros / 1e6 - (began + ended) / 2
            items.append(judge_clock("redis", skew_s * 1000, (ended - began) * 1000))
        if any(item.name == "mode" and item.level == "fail" for item in items):
            return items  # No script runs there, so nothing more can be said.
        observed = await observe(settings, Places(sorted(pools_of(models)), {cell: url}), [])
    except VerbError as error:
        advice = "Is it up, and is TIERLANE_REDIS_URL its address?"
        if cell != DEFAULT_CELL:
            advice = f"Is it up, and is redis_url its address? Its customers are served without it; `tierlane cell drain {cell}`."
        return [CheckItem("redis", "reachable", "fail", str(error), advice)]
    for place, found in observed.items():
        pool = place.partition("@")[0]
        before = seen[pool].workers if pool in seen else []
        seen[pool] = replace(found, workers=[*before, *found.workers])
    return items


async def _gateway(settings: Settings, url: str | None) -> list[CheckItem]:
    try:
        gateway = gateway_of(settings, url)
    except SettingsError as error:
        return [CheckItem("gateway", "readyz", "fail", str(error), "Set it to the gateways' own.")]
    if gateway is None:
        return [CheckItem("gateway", "readyz", "warn", "not checked: no address is known", "Name one with --url.")]
    try:
        async with aiohttp.ClientSession() as session:
            ready = await is_ready(session, gateway)
            said, advice = (
                f"{gateway.url} is {'ready' if ready else 'not ready'}",
                "GET /readyz says what it waits for.",
            )
            state = judged("gateway", "readyz", said, advice, holds=ready)
            return [state, *judge_gateway(await read_health(session, gateway))]
    except VerbError as error:
        return [CheckItem("gateway", "readyz", "fail", str(error), "Is it up, and is this its address?")]
