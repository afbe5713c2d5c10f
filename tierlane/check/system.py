"""`tierlane check`: looks at everything that a system stands on, group by group. One that is away is told, not fatal.

What is seen is judged in `verdicts`; here it is only fetched.
"""

import time
from typing import TYPE_CHECKING

import aiohttp
import typer

from ledger.catalog.loader import BadCatalogRow
from ledger.catalog.snapshot import Model
from ledger.catalog_load import read_models, read_tiers
from ledger.dead_letters import count_letters
from ledger.postgres import Connection, place_of
from ledger.revision import current_revision, head_revision, is_behind
from scheduler.errors import StartError
from scheduler.redis_client.connections import bounded
from scheduler.redis_client.keys import pools_of
from tierlane.check import verdicts
from tierlane.check.item import Item, document, lines_of, passes
from tierlane.connect import VerbError, database, run
from tierlane.operate.gateway_client import Gateway, gateway_of, is_ready, read_health
from tierlane.operate.redis_connect import look_at, redis_of
from tierlane.output import print_json
from tierlane.setting_errors import SettingsError

if TYPE_CHECKING:
    from redis.asyncio import Redis

    from tierlane.settings.model import Settings

NAME = "tierlane-check"
PATIENCE_S = 2.0


def check_system(settings: "Settings", url: str | None, output: str) -> int:
    """Print what was found; the exit code is 0 where nothing failed."""

    async def work() -> int:
        items = await look(settings, url)
        if output == "json":
            print_json(document(items))
        else:
            typer.echo("\n".join(lines_of(items)))
        return 0 if passes(items) else 1

    return run(work)


async def look(settings: "Settings", url: str | None) -> list[Item]:
    """All lines, in no particular order."""
    items = [Item("settings", "readable", "pass", f"PostgreSQL at {place_of(settings.database_url)}")]
    if not settings.redis_url:
        items.append(Item("settings", "redis_url", "fail", "TIERLANE_REDIS_URL is not set", "Every role needs it."))
    items += await _postgresql(settings)
    models: list[Model] = []
    items += await _catalog(settings, models)
    if settings.redis_url:
        items += await _redis(settings, models)
    return items + await _gateway(settings, url)


async def _postgresql(settings: "Settings") -> list[Item]:
    try:
        async with database(settings, NAME) as connection:
            items = [Item("postgresql", "reachable", "pass", await connection.fetchval("SHOW server_version"))]
            items.append(await _clock_of_postgresql(connection))
        revision = await current_revision(settings.database_url)
    except (VerbError, StartError) as error:
        return [
            Item("postgresql", "reachable", "fail", str(error), "Is it up, and is TIERLANE_DATABASE_URL its address?")
        ]
    return [*items, verdicts.migrations(revision, head_revision(), behind=is_behind(revision))]


async def _clock_of_postgresql(connection: Connection) -> Item:
    began = time.time()
    told = float(await connection.fetchval("SELECT extract(epoch FROM clock_timestamp())"))
    ended = time.time()
    return verdicts.clock("postgresql", (told - (began + ended) / 2) * 1000, (ended - began) * 1000)


async def _catalog(settings: "Settings", models: list[Model]) -> list[Item]:
    """The rows, as gateways would read them; `models` gets the models."""
    try:
        async with database(settings, NAME) as connection:
            items = [*verdicts.tiers(await read_tiers(connection))]
            models += (await read_models(connection)).values()
            return [*items, verdicts.models(models), verdicts.dead_letters(await count_letters(connection))]
    except BadCatalogRow as error:
        return [Item("catalog", "rows", "fail", str(error), "Correct the row: gateways keep the last good picture.")]
    except VerbError:
        return [Item("catalog", "rows", "warn", "not seen")]


async def _redis(settings: "Settings", models: list[Model]) -> list[Item]:
    try:
        async with redis_of(settings) as client:
            async with bounded(PATIENCE_S):
                info = await client.info()
            items = [Item("redis", "reachable", "pass", "it answers"), *verdicts.redis(info)]
            items.append(await _clock_of_redis(client))
        if any(item.name == "mode" and item.level == "fail" for item in items):
            return items  # No script runs there, so nothing more can be said.
        return items + verdicts.pools(models, await look_at(settings, sorted(pools_of(models)), []))
    except VerbError as error:
        return [Item("redis", "reachable", "fail", str(error), "Is it up, and is TIERLANE_REDIS_URL its address?")]


async def _clock_of_redis(client: "Redis") -> Item:
    began = time.time()
    async with bounded(PATIENCE_S):
        seconds, micros = await client.time()
    ended = time.time()
    skew_s = seconds + micros / 1e6 - (began + ended) / 2
    return verdicts.clock("redis", skew_s * 1000, (ended - began) * 1000)


async def _gateway(settings: "Settings", url: str | None) -> list[Item]:
    try:
        gateway = gateway_of(settings, url)
    except SettingsError as error:
        return [Item("gateway", "readyz", "fail", str(error), "Set it to the gateways' own.")]
    if gateway is None:
        return [Item("gateway", "readyz", "warn", "not asked: no address is known", "Name one with --url.")]
    try:
        return await _ask(gateway)
    except VerbError as error:
        return [Item("gateway", "readyz", "fail", str(error), "Is it up, and is this its address?")]


async def _ask(gateway: Gateway) -> list[Item]:
    async with aiohttp.ClientSession() as session:
        ready = await is_ready(session, gateway)
        said = [
            Item("gateway", "readyz", "pass", f"{gateway.url} is ready")
            if ready
            else Item("gateway", "readyz", "fail", f"{gateway.url} is not ready", "GET /readyz says what it waits for.")
        ]
        return said + verdicts.gateway(await read_health(session, gateway))
