"""`tierlane cell`: the rows of cells in PostgreSQL, and what waits and runs at their servers.

All verbs reach the servers of cells here: with the user and password of TIERLANE_REDIS_URL, which the rows do not have.
"""

import asyncio
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import NamedTuple

from redis.asyncio import Redis

from ledger.admin.changes import Row, changing
from ledger.admin.rows import (
    cell_change_age_s,
    close_cell,
    count_residents,
    drain_cell,
    list_cells,
    list_tiers,
    open_cell,
)
from ledger.catalog.loader import read_models
from ledger.catalog.quotas import BadCatalogRow
from ledger.catalog.snapshot import CellRow
from ledger.jobs import count_open_jobs
from ledger.postgres import Connection
from scheduler.cells.places import cell_urls
from scheduler.errors import RedisUnavailable, StartError
from scheduler.protocol.pool_view import Remaining, Unfinished
from scheduler.protocol.presence import Presence
from scheduler.redis_client.connections import check_server, command_client, diagnosed, server_url, tag_at
from scheduler.redis_client.keys import Keys, pools_of
from tierlane.admin.change_result import ChangeResult
from tierlane.admin.options import VerbCall
from tierlane.admin.remote import APPLICATION
from tierlane.admin.runner import actor_of, apply
from tierlane.connect import UsageError, VerbError, database
from tierlane.output import Column, counted, named, print_rows
from tierlane.settings.model import Settings

TIMEOUT_S = 2.0  # Longer than for requests: a person waits.
KNOWN_AFTER_S = 2.0
"""Every gateway and scheduler knows of a change after this time."""

NO_URL = "TIERLANE_REDIS_URL is not set, so the running system cannot be read."
COLUMNS = (
    *named("name", "state", "weight", "server", "customers", "waiting", "running"),
    Column("healthy_gpus", "GPUS"),
    Column("problem", "PROBLEM"),
)

FORCE = "--force closes it nevertheless: its requests then end with `no_capacity`, and their records may be lost."


@asynccontextmanager
async def redis_at(url: str) -> AsyncIterator[Redis]:
    """A client of the cell at a URL. Raises VerbError if its Redis does not respond."""
    try:
        client = command_client(await server_url(url), TIMEOUT_S)
    except StartError as error:
        raise VerbError(str(error)) from error
    try:
        yield client
    except RedisUnavailable as error:
        raise VerbError(str(await diagnosed(client, error))) from error
    finally:
        await client.aclose()


async def urls_of_cells(connection: Connection, settings: Settings, only: str | None = None) -> dict[str, str]:
    """The URLs of all cells that are not closed, or of the cell `only`. Raises UsageError for an unknown one, and VerbError."""
    if not settings.redis_url:
        raise VerbError(NO_URL)
    urls = cell_urls(settings.redis_url, [as_cell(row) for row in await list_cells(connection)])
    if only is not None and only not in urls:
        raise UsageError(f"--cell: must be one of {', '.join(urls)}, got {only!r}")
    return urls if only is None else {only: urls[only]}


def as_cell(row: Row) -> CellRow:
    """A row of `list_cells`."""
    return CellRow(row["name"], row["redis_url"], row["state"], row["weight"])


class CellContents(NamedTuple):
    """What is in a cell, in all its pools."""

    remaining: Remaining
    healthy_gpus: int


class Layout(NamedTuple):
    """The cells, and what is needed to read them: the names of tiers, and of the pools that models name."""

    cells: Mapping[str, Row]
    tiers: Sequence[str]
    pools: Collection[str]


async def pools_to_read(connection: Connection, settings: Settings) -> set[str]:
    """The own pool and those of enabled models. Raises VerbError."""
    try:
        return pools_of((await read_models(connection)).values()) | {settings.pool}
    except BadCatalogRow as error:
        raise VerbError(f"The models cannot be read: {error}") from error


async def _layout(connection: Connection, settings: Settings) -> Layout:
    cells = {row["name"]: row for row in await list_cells(connection)}
    tiers = [tier["name"] for tier in await list_tiers(connection)]
    return Layout(cells, tiers, await pools_to_read(connection, settings))


async def _contents(settings: Settings, layout: Layout, name: str) -> CellContents:
    """Read a cell. Raises VerbError if it does not respond."""
    urls = cell_urls(settings.redis_url, [as_cell(row) for row in layout.cells.values()])
    if not settings.redis_url or name not in urls:
        raise VerbError(NO_URL)
    async with redis_at(urls[name]) as client:
        unfinished = Unfinished(client)
        total, gpus = Remaining(), 0
        for pool in sorted(await unfinished.pools() | set(layout.pools)):
            keys = Keys(pool, tag_at(client))
            found = await unfinished.remaining(keys, layout.tiers)
            total = Remaining(*map(sum, zip(total, found, strict=True)))
            gpus += (await Presence(client, keys, gone_ms=settings.gone_ms).observe([])).healthy_gpus
    return CellContents(total, gpus)


async def show_cells(call: VerbCall) -> int:
    """Print all cells with their customers, and what waits and runs there."""
    async with database(call.settings, APPLICATION) as connection:
        layout = await _layout(connection, call.settings)
        residents = await count_residents(connection, list(layout.cells.values()))
    rows = await asyncio.gather(
        *(_row(call.settings, layout, row | {"customers": residents[name]}) for name, row in layout.cells.items())
    )
    print_rows(call.output, COLUMNS, rows, "cells")
    return 0


async def _row(settings: Settings, layout: Layout, cell: Row) -> Row:
    url = cell["redis_url"] or settings.redis_url
    row = cell | {"server": without_credentials(url) or None, "problem": None}
    row |= dict.fromkeys(("waiting", "running", "healthy_gpus"))
    del row["redis_url"]
    if cell["state"] != "closed":
        try:
            found = await _contents(settings, layout, cell["name"])
        except VerbError:
            row["problem"] = "not responding" if settings.redis_url else "TIERLANE_REDIS_URL is not set"
        else:
            remaining = found.remaining
            row |= {"waiting": remaining.waiting, "running": remaining.running, "healthy_gpus": found.healthy_gpus}
    return row


def without_credentials(url: str) -> str:
    """The address of a server: its URL without user, password and options."""
    scheme, separator, rest = url.partition("#")[0].partition("?")[0].partition("://")
    return f"{scheme}{separator}{rest.rpartition('@')[2]}"


async def open_(call: VerbCall, name: str, values: Row, *, force: bool) -> int:
    """Add a cell, or open it again. Unless `force`, its server must be usable."""

    async def change(connection: Connection) -> ChangeResult:
        return ChangeResult([await open_cell(connection, name, values)])

    async with (
        database(call.settings, APPLICATION) as connection,
        changing(connection, actor_of(call), dry_run=True),
    ):
        new = (await open_cell(connection, name, values)).new or {}
    nevertheless = "--force opens the cell nevertheless."
    if not force and not call.settings.redis_url:
        raise VerbError(f"TIERLANE_REDIS_URL is not set, so the server cannot be checked. Set it; {nevertheless}")
    if not force:
        try:
            async with redis_at(cell_urls(call.settings.redis_url, [as_cell(new)])[new["name"]]) as client:
                await check_server(client)
        except (StartError, VerbError) as error:
            raise VerbError(f"The server of cell {new['name']} cannot be used: {error} {nevertheless}") from error
    return await apply(call, change)


async def drain(call: VerbCall, name: str) -> int:
    """Give a cell no new requests, and say what remains there."""
    async with database(call.settings, APPLICATION) as connection:
        layout = await _layout(connection, call.settings)
    try:
        found = await _contents(call.settings, layout, name) if name in layout.cells else CellContents(Remaining(), 0)
        effect = f"It has {contents(found.remaining)}, which end there."
    except VerbError:
        effect = "It does not respond: what waits there is unknown."

    async def change(connection: Connection) -> ChangeResult:
        return ChangeResult([await drain_cell(connection, name)], notes=[effect])

    return await apply(call, change)


def contents(remaining: Remaining) -> str:
    """What is not finished, in words."""
    waiting, running = counted(remaining.waiting, "waiting request"), counted(remaining.running, "running request")
    return f"{waiting}, {running} and {counted(remaining.unwritten, 'record')} for the audit"


async def close(call: VerbCall, name: str, *, force: bool) -> int:
    """Stop serving a cell. Unless `force`, nothing may remain there."""
    notes = [] if name == "default" else await _lost(call, name, force=force)

    async def change(connection: Connection) -> ChangeResult:
        made, jobs = await close_cell(connection, name, forced=force)
        continued = [f"{counted(jobs, 'job')} moved to another cell."] if jobs else []
        return ChangeResult([made], notes=notes + continued)

    return await apply(call, change)


async def _lost(call: VerbCall, name: str, *, force: bool) -> list[str]:
    """What is lost if the cell is closed, as sentences. Raises VerbError if something is, unless `force`."""
    async with database(call.settings, APPLICATION) as connection:
        layout = await _layout(connection, call.settings)
        cell = layout.cells.get(name)
        if cell is None or cell["state"] == "closed" or (cell["state"] == "open" and not force):
            return []  # The change itself fails, or loses nothing.
        age_s = await cell_change_age_s(connection, name)
        if not force and age_s is not None and age_s < KNOWN_AFTER_S:
            await asyncio.sleep(KNOWN_AFTER_S - age_s)  # Until then, gateways may still send requests there.
        jobs = await count_open_jobs(connection, name)
    try:
        found: CellContents | None = await _contents(call.settings, layout, name)
    except VerbError as error:
        if not force:
            raise VerbError(f"Cell {name} cannot be closed: what remains there is unknown. {error} {FORCE}") from error
        return [f"What remains in cell {name} is unknown, and is lost."]
    remaining = found.remaining if found else Remaining()
    if not force and (jobs or any(remaining)):
        results = f"; {counted(jobs, 'job')} without a result" if jobs else ""
        raise VerbError(f"Cell {name} cannot be closed yet: it has {contents(remaining)}{results}. {FORCE}")
    return [f"Lost: {contents(remaining)}."] if any(remaining) else []
