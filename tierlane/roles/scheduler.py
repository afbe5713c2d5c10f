"""The scheduler's process: it serves its own pool, and every other one that the catalog names, in every cell. Any number may run.

For each pool in each cell it runs dispatcher, reaper, auditor and the keepers of quotas and cordons, with a policy made of the
catalog. A gateway runs the same while no scheduler does (`StandIn`).

A pool whose model was renamed or deleted is served while something waits there. Every scheduler looks once a second and
keeps the set `pools` in Redis: what models name, and of the rest what is not finished. So one that starts later finds
it, and a pool that is finished and unnamed is forgotten.
"""

import asyncio
import gc
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import structlog
from redis.asyncio import Redis
from uuid_utils import uuid7

from ledger.audit.auditor import Auditor, AuditPolicy
from ledger.audit.maintenance import MaintenancePolicy
from ledger.audit.quota_restore import QuotaKeeper
from ledger.audit.window import LONGEST_S, HoldPolicy
from ledger.catalog.follower import Catalog
from ledger.catalog.snapshot import CellRow, Model, Snapshot
from ledger.jobs import job_pools
from ledger.postgres import AWAY, closing, connect
from ratelimit.request_limits import RequestLimits
from ratelimit.shares import TierShare
from scheduler.batching.dispatcher import Dispatcher, ServiceWatch, Waker
from scheduler.batching.policy import BatchPolicy, TierPolicy
from scheduler.batching.reaper import Reaper
from scheduler.cells.moves import MovesPublisher, PoolPlan
from scheduler.cells.places import cell_urls
from scheduler.errors import RedisUnavailable
from scheduler.fault_log import LoggedFaults, log_fault
from scheduler.protocol.audit_outbox import Outbox
from scheduler.protocol.batches import Batches
from scheduler.protocol.cancellation import Terminations
from scheduler.protocol.index_repair import IndexRepair
from scheduler.protocol.limits import QuotaRestore
from scheduler.protocol.pool_view import Unfinished
from scheduler.protocol.presence import Cordons, CordonSync, Presence
from scheduler.redis_client.connections import blocking_client, command_client, server_url, tag_at
from scheduler.redis_client.keys import DEFAULT_CELL, Keys, cell_of, is_pool_name, place_name, pools_to_serve
from scheduler.tasks import Loop, TaskRegistry, end_all, next_tick
from tierlane.roles.allotter import run_allotter
from tierlane.roles.process import check_database, check_redis, configure_logs, run_role, stop_on_signals, with_cluster

if TYPE_CHECKING:
    from tierlane.settings.model import Settings


DEFAULT_TIERS = (TierPolicy("enterprise", 1, 0.05), TierPolicy("paid", 2, 0.25), TierPolicy("free", 3, 0.10))
DEFAULT_BATCH_SIZE, DEFAULT_WINDOW_MS = 32, 40.0
"""What holds until PostgreSQL has been reached for the first time: work that is queued already must go on."""

LEAVING_S = 600.0


class LeavingTiers:
    """Tiers that were renamed or deleted a moment ago, in their old place but without a share.

    A gateway may hear of it later than we do, or be cut off from PostgreSQL for a while: what it still lets in under the
    old name, and requests queued already, would otherwise stay in an unserved queue until their deadline.
    """

    def __init__(self, clock_s: Callable[[], float]) -> None:
        self._clock_s = clock_s
        self._known: dict[str, tuple[float, TierPolicy]] = {}

    def kept(self, policy: BatchPolicy) -> BatchPolicy:
        """The policy, and those that were in one within the last ten minutes."""
        now, names = self._clock_s(), {tier.name for tier in policy.tiers}
        self._known |= {tier.name: (now + LEAVING_S, tier) for tier in policy.tiers}
        if len(self._known) == len(names):
            return policy
        self._known = {name: known for name, known in self._known.items() if now < known[0]}
        left = [replace(tier, guaranteed_share=0.0) for name, (_, tier) in self._known.items() if name not in names]
        return replace(policy, tiers=(*policy.tiers, *left))


def pool_model(models: Iterable[Model], pool: str) -> Model | None:
    """The model whose row rules the pool's batches: the enabled one with the smallest batch size.

    A pool normally serves one model; with several, a batch must fit each of them.
    """
    enabled = (model for model in models if model.enabled and model.pool == pool)
    return min(enabled, key=lambda model: (model.max_batch_size, model.name), default=None)


def tpot_objective(snapshot: Snapshot | None, pool: str) -> float:
    """The smallest objective of the pool's models for the milliseconds per token; 0: none."""
    models = [model for model in snapshot.models.values() if model.enabled and model.pool == pool] if snapshot else []
    return min((model.tpot_ms for model in models if model.tpot_ms), default=0.0)


def without_paused(policy: BatchPolicy) -> BatchPolicy:
    """The policy for forming batches: a paused tier is as good as empty there. What else is done for its queue goes on."""
    if not any(tier.paused for tier in policy.tiers):
        return policy
    return replace(policy, tiers=tuple(tier for tier in policy.tiers if not tier.paused))


def batch_policy(snapshot: Snapshot | None, settings: "Settings") -> BatchPolicy:
    """The policy as of this snapshot, or the defaults without one."""
    model = pool_model(snapshot.models.values(), settings.pool) if snapshot else None
    tiers = (
        tuple(
            TierPolicy(tier.name, tier.priority, tier.guaranteed_share, tier.paused, tier.slo_ms)
            for tier in snapshot.tiers
        )
        if snapshot
        else DEFAULT_TIERS
    )
    return BatchPolicy(
        max_batch_size=model.max_batch_size if model else DEFAULT_BATCH_SIZE,
        max_wait_ms=model.max_wait_ms if model else DEFAULT_WINDOW_MS,
        lookahead_workers=settings.batch_lookahead_workers,
        headroom=settings.batch_headroom,
        background_share=settings.background_share,
        ageing_ms=settings.ageing_ms,
        tiers=tiers,
        max_batch_tokens=(model.max_batch_tokens or 0) if model else 0,
    )


CellShares = Callable[[str, str], Mapping[str, float]]
"""The guaranteed shares of tiers in a pool and a cell, as in `MovesPublisher`."""

MIN_LEFT_MS = 50
"""A lost batch is retried only for members with this much time left; the worker that claims them knows better."""


async def run_pool(
    settings: "Settings",
    stop: asyncio.Event,
    catalog: Catalog,
    client: Redis,
    shares: CellShares,
    *,
    standing_in: bool = False,
) -> None:
    """Run until `stop`; then the auditor writes what waits. `client` is for commands, of any pool."""
    blocking = blocking_client(settings.redis_url)
    try:
        await _run_loops(settings, stop, catalog, client, blocking, shares=shares, standing_in=standing_in)
    finally:
        await blocking.aclose()


async def _run_loops(
    settings: "Settings",
    stop: asyncio.Event,
    catalog: Catalog,
    client: Redis,
    blocking: Redis,
    *,
    shares: CellShares,
    standing_in: bool,
) -> None:
    keys, leaving, tasks = Keys.at(settings.redis_url, settings.pool), LeavingTiers(time.monotonic), TaskRegistry()
    cell = cell_of(settings.redis_url)

    def policy() -> BatchPolicy:
        return leaving.kept(batch_policy(catalog.snapshot, settings)).with_shares(shares(settings.pool, cell))

    def tier_names() -> list[str]:
        return [tier.name for tier in policy().tiers]

    waker = Waker(blocking, keys)
    presence = Presence(client, keys, gone_ms=settings.gone_ms)
    service = ServiceWatch(presence, tier_names)
    batches = Batches(client, keys, lease_ms=settings.lease_ms)
    dispatcher = Dispatcher(
        batches,
        waker,
        lambda: without_paused(policy()),
        time.monotonic,
        lambda: service.service,
        slot_workers=lambda: service.slot_workers,
    )
    reaper = Reaper(
        Terminations(client, keys, lease_ms=settings.lease_ms),
        presence,
        tier_names,
        lambda: MIN_LEFT_MS,
        settings.reap_ms,
        standing_in=standing_in,
        notices=lambda: [f"{settings.own_name}: {ended.sentence()}" for ended in tasks.ended],
        repair=IndexRepair(client, keys, lease_ms=settings.lease_ms),
    )
    auditor = _auditor(settings, Outbox(client, keys, uuid7().hex), lambda: service.limits)
    quotas = QuotaKeeper(settings.statement_url, QuotaRestore(client, keys), lambda: catalog.snapshot)
    cordons = CordonSync(
        Cordons(client, keys),
        lambda: _cordoned(catalog),
        time.monotonic,
        lambda: tpot_objective(catalog.snapshot, settings.pool),
    )
    async with asyncio.TaskGroup() as group:
        roles: dict[str, Loop] = {
            "wake reader": waker.run,
            "dispatcher": dispatcher.run,
            "service times": service.run,
            "caretaker": reaper.run,
            "quota keeper": quotas.run,
            "cordon keeper": cordons.run,
        }
        loops = [group.create_task(tasks.run_forever(name, loop)) for name, loop in roles.items()]
        group.create_task(tasks.run_forever("auditor", auditor.run, stop))
        await stop.wait()
        await asyncio.gather(end_all(loops), auditor.stop())


def _cordoned(catalog: Catalog) -> frozenset[str] | None:
    """The cordoned workers according to PostgreSQL; None if it was not read recently: another scheduler may have read it."""
    return catalog.snapshot.cordoned if catalog.snapshot is not None and catalog.fresh else None


def _auditor(settings: "Settings", outbox: Outbox, limits: Callable[[], RequestLimits]) -> Auditor:
    chores = MaintenancePolicy(
        deadline_s=lambda: settings.request_limits(limits()).total_ms / 1000,
        job_deadline_s=settings.job_deadline_ms / 1000,
        grace_s=settings.audit_grace_ms / 1000,
    )
    interval_s = settings.audit_interval_ms / 1000
    # Not longer than until a row without an end is closed: what never ends must have one by then.
    hold = HoldPolicy(hold_s=2 * interval_s, deep_s=min(LONGEST_S, settings.longest.total_ms / 1000 + chores.grace_s))
    policy = AuditPolicy(
        take_limit=settings.audit_batch,
        interval_s=interval_s,
        hold=hold,
        maintenance=chores,
        pool=place_name(settings.pool, cell_of(settings.redis_url)),
    )
    return Auditor(settings.session_url, outbox, policy)


LEFT_POOLS_LOOK_S = 1.0
JOBS_LOOK_S = 30.0
"""Between two looks at jobs, which wait in PostgreSQL and may be in no queue when Redis came back empty."""
STATEMENT_TIMEOUT_MS = 3000


class LeftPools:
    """The pools of the cell of `client`. `served`: those of this process. `names` are to be served beside those that models
    name.
    """

    def __init__(
        self,
        client: Redis,
        catalog: Catalog,
        database_url: str,
        served: Collection[str],
        *,
        cell: str = DEFAULT_CELL,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._unfinished = Unfinished(client)
        self._tag = tag_at(client)
        self._cell = cell
        self._catalog = catalog
        self._url = database_url
        self._served = served
        self._clock = clock
        self._with_jobs: frozenset[str] | None = None
        self._jobs_due = clock()
        self.names: frozenset[str] = frozenset()

    async def run(self) -> None:
        """Look for ever."""
        while True:
            # What was found last stands; nothing is served without Redis anyway.
            with LoggedFaults("looking for left pools failed"), suppress(RedisUnavailable):
                await self.turn()
            await next_tick(LEFT_POOLS_LOOK_S)

    async def turn(self) -> None:
        """Look once. Raises RedisUnavailable."""
        snapshot = self._catalog.snapshot
        if snapshot is None:
            return
        await self._look_at_jobs()
        known, named = await self._unfinished.pools(), pools_to_serve(snapshot.models.values())
        tiers = [tier.name for tier in snapshot.tiers]
        with_jobs = self._with_jobs or frozenset()
        left = {
            pool for pool in (known | set(self._served)) - named - with_jobs if not await self._is_over(pool, tiers)
        }
        self.names = frozenset(left) | (with_jobs - named)
        kept = named | self.names
        await self._unfinished.note(kept, known - kept)

    async def _is_over(self, pool: str, tiers: Collection[str]) -> bool:
        # Until PostgreSQL was read, its jobs are unknown: then no pool is removed.
        return self._with_jobs is not None and await self._unfinished.is_empty(Keys(pool, self._tag), tiers)

    async def _look_at_jobs(self) -> None:
        if self._clock() < self._jobs_due:
            return
        self._jobs_due = self._clock() + JOBS_LOOK_S
        try:
            connection = await connect(
                self._url,
                name="tierlane-scheduler",
                connect_timeout_s=STATEMENT_TIMEOUT_MS / 1000,
                statement_timeout_ms=STATEMENT_TIMEOUT_MS,
            )
            async with closing(connection):
                places = [place.partition("@") for place in await job_pools(connection)]
            here = {pool for pool, _, cell in places if (cell or DEFAULT_CELL) == self._cell}
            self._with_jobs = frozenset(filter(is_pool_name, here))
        except AWAY:
            return


class StandIn:
    """The work of schedulers in a gateway that has this catalog, for each pool on connections of its own."""

    def __init__(self, settings: "Settings", catalog: Catalog) -> None:
        self._settings = settings
        self._catalog = catalog
        self._served: dict[str, set[str]] = {}  # By cell.
        self._moves = moves_publisher(settings, catalog)

    async def run(self, redis_url: str, pool: str, stop: asyncio.Event) -> None:
        """Run for `pool` in the cell at this URL until `stop`. With the gateway's own pool, also look for those that are left."""
        settings = self._settings.model_copy(update={"redis_url": redis_url, "pool": pool})
        client, cell = command_client(redis_url), cell_of(redis_url)
        served = self._served.setdefault(cell, set())
        served.add(pool)
        left = LeftPools(client, self._catalog, settings.statement_url, served, cell=cell)
        is_own = pool == self._settings.pool
        try:
            async with asyncio.TaskGroup() as group:
                besides = [group.create_task(left.run())] if is_own and settings.serve_pools == "all" else []
                if is_own and cell == DEFAULT_CELL:
                    besides.append(group.create_task(publish_moves(self._moves)))
                    besides.append(group.create_task(run_allotter(self._settings, self._catalog)))
                await run_pool(settings, stop, self._catalog, client, self._moves.shares, standing_in=True)
                await end_all(besides)
        finally:
            await client.aclose()


CELL_RETRY_S = 1.0
STOP_LOOK_S = 0.1
"""Between two looks at which pools the catalog names."""

log = structlog.get_logger("scheduler")


def run(settings: "Settings") -> int:
    """Run until SIGTERM; returns the exit code."""
    configure_logs(settings.log_format, settings.log_level, "scheduler", settings.own_name)
    return run_role(lambda: _serve(settings))


async def _serve(settings: "Settings") -> int:
    stop = stop_on_signals()
    settings = await with_cluster(settings)
    catalog = Catalog(settings.session_url)
    try:
        await check_redis(settings.redis_url)
        await check_database(settings.session_url)
        await catalog.start()
        gc.collect()
        gc.freeze()  # What is here stays: it need not be looked over again and again.
        await serve_cells(settings, stop, catalog)
    finally:
        await catalog.stop()
    return 0


async def serve_cells(settings: "Settings", stop: asyncio.Event, catalog: Catalog) -> None:
    """Serve every cell of the catalog until `stop`, or until it is closed."""
    running: dict[str, asyncio.Event] = {}
    moves = moves_publisher(settings, catalog)
    async with asyncio.TaskGroup() as group:
        of_all_cells = [
            group.create_task(publish_moves(moves), name="moves of workers"),
            group.create_task(run_allotter(settings, catalog), name="allotter"),
        ]
        while not stop.is_set():
            urls = cell_urls(settings.redis_url, catalog.snapshot.cells if catalog.snapshot is not None else ())
            for cell in sorted(urls.keys() - running.keys()):
                closed = running[cell] = asyncio.Event()
                group.create_task(_serve_cell(settings, urls[cell], closed, catalog, moves.shares), name=f"cell {cell}")
            for cell in running.keys() - urls.keys():
                log.info("cell closed", cell=cell)
                running.pop(cell).set()
            await _asked_to_stop(stop, STOP_LOOK_S)
        for closed in running.values():
            closed.set()
        await end_all(of_all_cells)


def moves_publisher(settings: "Settings", catalog: Catalog) -> MovesPublisher:
    """The moves of workers between the cells of the catalog."""

    def rows() -> Sequence[CellRow]:
        return catalog.snapshot.cells if catalog.snapshot is not None else ()

    def plans() -> list[PoolPlan]:
        return [pool_plan(catalog.snapshot, pool, settings) for pool in sorted(wanted_pools(settings, catalog))]

    return MovesPublisher(settings.redis_url, plans, rows)


async def publish_moves(moves: MovesPublisher) -> None:
    """Publish the moves of workers; never returns."""
    await TaskRegistry().run_forever("moves of workers", moves.run)


def pool_plan(snapshot: Snapshot | None, pool: str, settings: "Settings") -> PoolPlan:
    """What the moves of a pool's workers depend on, as of this snapshot."""
    policy = batch_policy(snapshot, settings.model_copy(update={"pool": pool}))
    model = pool_model(snapshot.models.values(), pool) if snapshot else None
    return PoolPlan(
        pool,
        [TierShare(tier.name, tier.priority, tier.guaranteed_share) for tier in policy.tiers],
        frozenset(tier.name for tier in policy.tiers if tier.paused),
        policy.max_batch_size,
        1000 / max(1.0, model.rps_per_gpu if model else 0.0),
        settings.gone_ms,
    )


async def _serve_cell(
    settings: "Settings", redis_url: str, stop: asyncio.Event, catalog: Catalog, shares: CellShares
) -> None:
    """A fault of one cell does not affect the others; one of the default cell ends the process, which is restarted."""
    cell = cell_of(redis_url)
    while not stop.is_set():
        try:
            redis_url = await server_url(redis_url)
            client = command_client(redis_url)
            try:
                await serve_pools(settings.model_copy(update={"redis_url": redis_url}), stop, catalog, client, shares)
            finally:
                await client.aclose()
        except Exception as error:
            if cell == DEFAULT_CELL:
                raise
            log_fault(f"cell {cell} is not served", error)
            await _asked_to_stop(stop, CELL_RETRY_S)


async def serve_pools(
    settings: "Settings", stop: asyncio.Event, catalog: Catalog, client: Redis, shares: CellShares
) -> None:
    """A pool is served from its first appearance until the process ends, because requests may still be queued in it."""
    served: set[str] = set()
    left = LeftPools(client, catalog, settings.statement_url, served, cell=cell_of(settings.redis_url))
    async with asyncio.TaskGroup() as group:
        looking = group.create_task(left.run()) if settings.serve_pools == "all" else None
        while not stop.is_set():
            for pool in sorted((wanted_pools(settings, catalog) | left.names) - served):
                log.info("pool served", pool=pool)
                served.add(pool)
                of_pool = settings.model_copy(update={"pool": pool})
                group.create_task(run_pool(of_pool, stop, catalog, client, shares), name=f"pool {pool}")
            await _asked_to_stop(stop, STOP_LOOK_S)
        if looking is not None:
            looking.cancel()


def wanted_pools(settings: "Settings", catalog: Catalog) -> set[str]:
    """Its own, and each that a model names, even a disabled one: an outbox that is not emptied loses audit records."""
    if catalog.snapshot is None or settings.serve_pools != "all":
        return {settings.pool}
    return {settings.pool} | pools_to_serve(catalog.snapshot.models.values())


async def _asked_to_stop(stop: asyncio.Event, within_s: float) -> None:
    try:
        async with asyncio.timeout(within_s):
            await stop.wait()
    except TimeoutError:
        return
