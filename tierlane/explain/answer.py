"""The answer of `tierlane explain`: what PostgreSQL and Redis know is read and explained.

A server that is unavailable is reported, not fatal. A customer is built from its rows as gateways build it, without
reading the hundred thousand others.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from datetime import UTC
from time import time
from typing import NamedTuple
from uuid import UUID

import asyncpg
import msgspec
import typer
from redis.asyncio import Redis

from ledger.audit.queries import FailedRequest, RequestRow, find_failed, find_gpu_share, find_request
from ledger.catalog.loader import (
    SnapshotBuild,
    catalog_statement,
    feed,
    in_snapshot,
    models_from,
    read_cells,
    read_cordons,
    readable,
    tiers_from,
)
from ledger.catalog.quotas import BadCatalogRow
from ledger.catalog.snapshot import NO_CORDONS, CellRow, Model, Tier, WorkerCordon
from ledger.postgres import Connection
from ratelimit.limits import LIMIT_COLUMNS, RemainingLimits, effective
from scheduler.cells.places import cell_urls, cells_of
from scheduler.errors import RedisUnavailable, TierlaneError
from scheduler.protocol.limits import LimitState, RejectionRecord, find_rejection, recent_rejections
from scheduler.protocol.pool_view import CustomerQueue, Observation, QueuePlace, WaitingView
from scheduler.protocol.presence import Presence
from scheduler.protocol.replies import RequestDetail, Results
from scheduler.redis_client.connections import command_client, server_url, tag_at
from scheduler.redis_client.keys import DEFAULT_CELL, Keys
from scheduler.request_id import created_ms
from scheduler.states import State
from tierlane.connect import VerbError, database
from tierlane.explain.customer import CustomerExplanation, CustomerRecord, Pool, explain_customer, factor_of
from tierlane.explain.request import RequestExplanation, explain_request
from tierlane.explain.text import as_json, customer_lines, request_lines
from tierlane.output import printable
from tierlane.settings.model import Settings

# Where a customer has the id of another one as its name, the id applies.
_CUSTOMER_ID = "SELECT id::text FROM customers WHERE name = $1 OR id::text = $1 ORDER BY id::text = $1 DESC LIMIT 1"

_SUSPENSION = """
SELECT changed_by, changed_at FROM config_changes
WHERE table_name = 'customers' AND row_key = $1
  AND new->>'status' = 'suspended' AND old->>'status' IS DISTINCT FROM 'suspended'
ORDER BY id DESC LIMIT 1
"""

NAME = "tierlane-explain"
SHARE_S = 60
"""Seconds of the audit from which the share of GPU time is read."""

MOST_FAILED = 3
"""Failed requests of a customer that are shown."""


class Rows(NamedTuple):
    """The configuration that applies to a customer; `row` is None where there is no such customer."""

    tiers: tuple[Tier, ...] = ()
    models: tuple[Model, ...] = ()
    row: CustomerRecord | None = None
    gpu_share: float | None = None  # None: not read in time, or no GPU time was used.
    cells: tuple[CellRow, ...] = ()
    failed: list[FailedRequest] | None = None  # Of the last hour; None: not read in time.
    cordons: Mapping[str, WorkerCordon] = NO_CORDONS

    def homes(self) -> tuple[str, ...]:
        """The cells of the customer."""
        if self.row is None or not self.cells:
            return (DEFAULT_CELL,)
        customer = self.row.customer
        return cells_of(customer.id, self.cells, customer.cell, customer.spread)


async def read_rows(connection: Connection, name: str) -> Rows:
    """Everything about a customer, by name or id. Raises BadCatalogRow, and what asyncpg raises."""
    async with in_snapshot(connection):
        tier_rows = await connection.fetch(catalog_statement("catalog_tiers"))
        model_rows = await connection.fetch(catalog_statement("catalog_models"))
        with readable():
            models, tiers = tuple(models_from(model_rows).values()), tiers_from(tier_rows)
        customer_id = await connection.fetchval(_CUSTOMER_ID, name)
        row = await _customer_row(connection, SnapshotBuild(tiers), customer_id) if customer_id else None
        cells, cordons = await read_cells(connection), await read_cordons(connection)
    share: float | None = None
    failed: list[FailedRequest] | None = None
    if row is not None:
        with suppress(asyncpg.QueryCanceledError):
            failed = await find_failed(connection, row.customer.id, MOST_FAILED)
        with suppress(asyncpg.QueryCanceledError):
            found = await find_gpu_share(connection, row.customer.id, SHARE_S, tier=row.customer.tier)
            share = found.gpu_ms / found.total_gpu_ms if found.total_gpu_ms else None
        if row.customer.suspended:
            with suppress(asyncpg.PostgresError):  # The role may not be allowed to read the changes.
                if change := await connection.fetchrow(_SUSPENSION, row.customer.id):
                    suspension = (
                        f"by {change['changed_by']} at {change['changed_at'].astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"
                    )
                    row = msgspec.structs.replace(row, suspension=suspension)
    return Rows(tiers, models, row, share, cells, failed, cordons)


async def _customer_row(connection: Connection, build: SnapshotBuild, customer_id: str) -> CustomerRecord:
    await feed(connection, build.add_quotas, "catalog_quotas_of", [customer_id])
    (row,) = await connection.fetch(catalog_statement("catalog_customers_of"), [customer_id])
    build.add_customers([row])
    await feed(connection, build.add_keys, "catalog_keys_of", [], [customer_id])
    state, now = build.finish(0, {}), time()
    customer = state.customers[customer_id]
    return CustomerRecord(
        customer=customer,
        own=frozenset(column.name for column in LIMIT_COLUMNS if row[column.name] is not None),
        keys=tuple(
            key.identity
            for key in state.keys.values()
            if not key.revoked
            and key.expires_at > now
            and (
                key.identity.key_rate > 0
                or key.identity.models is not customer.models
                or len(key.identity.quotas) > len(customer.quotas)
            )
        ),
    )


class RedisState(NamedTuple):
    """What Redis has about a customer; None where it was not read."""

    observation: Observation | None = None
    left: RemainingLimits | None = None
    refusals: list[RejectionRecord] | None = None
    queues: list[CustomerQueue] | None = None


def explain_name(settings: Settings, name: str, refusals: int, form: str) -> int:
    """Print a customer or a request; returns the exit code. Raises VerbError where nothing could be read."""

    async def work() -> int:
        explanation: CustomerExplanation | RequestExplanation
        if is_request_id(name):
            explanation = await _request(settings, name)
            lines, known = request_lines(explanation), explanation.found != "unknown"
        else:
            explanation = await _customer(settings, name, refusals)
            lines, known = customer_lines(explanation), True
        if form == "json":
            typer.echo(as_json(explanation))
        else:
            typer.echo("\n".join(map(printable, lines)), err=not known)
        return 0 if known else 1

    return asyncio.run(work())


def is_request_id(text: str) -> bool:
    """Whether this names a request; everything else names a customer."""
    try:
        return created_ms(text) > 0
    except ValueError:
        return False


async def _customer(settings: Settings, name: str, refusals: int) -> CustomerExplanation:
    rows, state, not_read = Rows(), RedisState(), list[str]()
    try:
        async with database(settings, NAME) as connection:
            rows = await read_rows(connection, name)
    except TierlaneError as error:
        not_read.append(_without(error, "base limits, priorities, shares and failed requests"))
    else:
        if rows.row is None:
            raise VerbError(await _worker_named(settings, name, rows) or _no_such(name))
    try:
        homes = rows.homes() or (DEFAULT_CELL,)
        async with _redis(settings, rows.cells, homes[0]) as client:
            state = await _read_redis(settings, client, name, rows, refusals)
    except RedisUnavailable as error:
        not_read.append(_without(error, "factors, what is left, and rejections"))
    if len(not_read) == 2:
        raise VerbError("\n".join(not_read))
    pool = Pool(settings.pool, rows.tiers, rows.models, state.observation, rows.cordons)
    return explain_customer(
        name,
        rows.row,
        pool,
        left=state.left,
        refusals=state.refusals,
        queues=state.queues,
        gpu_share=rows.gpu_share,
        failed=rows.failed,
        cells=rows.homes() if rows.row else (),
        not_read=not_read,
    )


async def _worker_named(settings: Settings, name: str, rows: Rows) -> str:
    """What to do with the id of a worker, "" if this is none of the default cell."""
    with suppress(RedisUnavailable):
        async with _redis(settings, rows.cells, DEFAULT_CELL) as client:
            for pool in dict.fromkeys((settings.pool, *(model.pool for model in rows.models))):
                presence = Presence(client, Keys(pool, tag_at(client)), gone_ms=settings.gone_ms)
                if any(worker.id == name for worker in (await presence.observe([])).workers):
                    return f"{printable(name)} is a worker: `tierlane gpu list` shows its state, and `tierlane top` the health."
    return ""


def _no_such(name: str) -> str:
    if name.startswith("tl_"):  # The text may be a complete key, so it is not repeated.
        return "This is an API key. `tierlane key show KEY` names its customer, and `tierlane explain CUSTOMER` its limits."
    if name.startswith("req_"):
        return f"{printable(name)} is not a request id: that is req_ and 32 hexadecimal digits, as x-request-id has it."
    return (
        f"There is no customer with the name or id {printable(name)}, and it is not a request id (req_...). "
        "`tierlane customer list` shows all customers."
    )


def _without(error: TierlaneError, what: str) -> str:
    """One sentence: the fault, and what could not be read because of it."""
    return f"{str(error).rstrip('.')}, so {what} could not be read."


async def _read_redis(settings: Settings, client: Redis, name: str, rows: Rows, refusals: int) -> RedisState:
    keys, row = Keys(settings.pool, tag_at(client)), rows.row
    presence = Presence(client, keys, gone_ms=settings.gone_ms)
    observation = await presence.observe([tier.name for tier in rows.tiers])
    customer_id, left, queues = None, None, None
    if row is not None:
        customer, customer_id = row.customer, row.customer.id
        # The call contains the limits in force, because Redis does not store limits.
        now = effective(row.as_identity(), factor_of(customer.tier, observation))
        of_keys = [(name, amount) for name, (_, amount) in row.key_quotas().items()]
        now = now._replace(quotas=(*now.quotas, *of_keys))
        left = await LimitState(client, keys).read(customer_id, now)
        queues = await WaitingView(client, keys).customer(customer.tier, customer_id, customer.weight)
    else:
        with suppress(ValueError):  # An id finds rejections without PostgreSQL.
            customer_id = str(UUID(name))
    known = await recent_rejections(client, keys, customer_id, refusals) if customer_id else None
    return RedisState(observation, left, known, queues)


class RequestState(NamedTuple):
    """What Redis has about a request."""

    detail: RequestDetail | None = None
    refusal: RejectionRecord | None = None
    place: QueuePlace | None = None


async def _request(settings: Settings, request_id: str) -> RequestExplanation:
    row: RequestRow | None = None
    cells: tuple[CellRow, ...] = ()
    state = RequestState()
    not_read: list[str] = []
    try:
        async with database(settings, NAME) as connection:
            row = await find_request(connection, request_id)
            with suppress(BadCatalogRow):
                cells = await read_cells(connection)
    except VerbError as error:
        not_read.append(_without(error, "rows of the audit"))
    urls = cell_urls(settings.redis_url, cells)
    faults: list[str] = []
    for cell in urls:
        try:
            async with _redis(settings, cells, cell) as client:
                keys, place, refusal = Keys(settings.pool, tag_at(client)), None, None
                detail = await Results(client, keys).request_detail(request_id)
                if detail is None and row is None:
                    refusal = await find_rejection(client, keys, request_id)
                elif detail is not None and detail.state == State.QUEUED:
                    waiting = WaitingView(client, keys)
                    place = await waiting.request(detail.queue, detail.customer_id, request_id)
                state = RequestState(detail, refusal, place)
        except RedisUnavailable as error:
            named = RedisUnavailable(f"Cell {cell}: {error}") if len(urls) > 1 else error
            faults.append(_without(named, "running requests and rejections"))
        if any(state):
            faults = []  # It is known, whatever the other cells have.
            break
    if not_read and len(faults) == len(urls):
        raise VerbError("\n".join(not_read + faults))
    not_read += faults
    return explain_request(request_id, row, state.detail, state.refusal, not_read, place=state.place)


@asynccontextmanager
async def _redis(settings: Settings, cells: Sequence[CellRow], cell: str) -> AsyncIterator[Redis]:
    """A client of the Redis of a cell. Raises RedisUnavailable where none is set."""
    if not settings.redis_url:
        raise RedisUnavailable("TIERLANE_REDIS_URL is not set.")
    client = command_client(await server_url(cell_urls(settings.redis_url, cells)[cell]))
    try:
        yield client
    finally:
        await client.aclose()
