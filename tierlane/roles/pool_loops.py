"""The loops of one pool: dispatcher, reaper, auditor and the keepers of quotas and cordons."""

import asyncio
import time
from collections.abc import Callable, Mapping

from redis.asyncio import Redis
from uuid_utils import uuid7

from ledger.audit.auditor import Auditor, AuditPolicy
from ledger.audit.maintenance import MaintenancePolicy
from ledger.audit.quota_restore import QuotaKeeper
from ledger.audit.window import LONGEST_S, HoldPolicy
from ledger.catalog.follower import Catalog
from ratelimit.request_limits import RequestLimits
from scheduler.batching.dispatcher import Dispatcher, ServiceWatch, Waker
from scheduler.batching.reaper import Reaper
from scheduler.batching.tier_policy import BatchPolicy
from scheduler.protocol.audit_outbox import Outbox
from scheduler.protocol.batches import Batches
from scheduler.protocol.cancellation import Terminations
from scheduler.protocol.cordons import Cordons, CordonSync
from scheduler.protocol.index_repair import IndexRepair
from scheduler.protocol.limits import QuotaRestore
from scheduler.protocol.presence import Presence
from scheduler.redis_client.connections import blocking_client
from scheduler.redis_client.keys import Keys, cell_of, place_name
from scheduler.tasks import Loop, TaskRegistry, end_all
from tierlane.roles.leaving_tiers import LeavingTiers
from tierlane.roles.pool_policy import batch_policy, tpot_objective, without_paused
from tierlane.settings.model import Settings

CellShares = Callable[[str, str], Mapping[str, float]]
"""The guaranteed shares of tiers in a pool and a cell, as in `MovesPublisher`."""

MIN_LEFT_MS = 50
"""A lost batch is retried only for members with this much time left; the worker that claims them knows better."""


async def run_pool(
    settings: Settings,
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
    settings: Settings,
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


def _auditor(settings: Settings, outbox: Outbox, limits: Callable[[], RequestLimits]) -> Auditor:
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
