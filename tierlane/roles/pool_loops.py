"""What a scheduler runs for one pool: dispatcher, caretaker, keepers of quotas and cordons, auditor. `settings.pool` says for which.

A gateway runs the same while no scheduler does.
"""

import asyncio
import os
import socket
import time
from typing import TYPE_CHECKING

from redis.asyncio import Redis
from uuid_utils import uuid7

from ledger.audit.auditor import Auditor, AuditPolicy
from ledger.audit.maintenance import ChorePolicy
from ledger.audit.quota_restore import QuotaKeeper
from ledger.audit_hold import LONGEST_S, HoldPolicy
from ledger.catalog.follower import Catalog
from scheduler.batching.dispatcher import Dispatcher, Waker
from scheduler.batching.policy import BatchPolicy
from scheduler.batching.reaper import Caretaker
from scheduler.cordons import CordonKeeper, Cordons
from scheduler.outbox import Outbox
from scheduler.protocol.batches import Batches
from scheduler.protocol.cancellation import Endings
from scheduler.protocol.index_repair import IndexRepair
from scheduler.protocol.presence import Presence
from scheduler.quota_restore import QuotaRestore
from scheduler.redis_client.connections import blocking_client, command_client
from scheduler.redis_client.keys import Keys
from scheduler.service_watch import ServiceWatch
from scheduler.tasks import Loop, TaskRegistry
from tierlane.roles.pool_policy import LeavingTiers, batch_policy, without_paused

if TYPE_CHECKING:
    from tierlane.settings.model import Settings

MIN_LEFT_MS = 50
"""A lost batch is retried only for members with this much time left; the worker that claims them knows better."""


async def stand_in(settings: "Settings", catalog: Catalog, pool: str, stop: asyncio.Event) -> None:
    """Run for `pool` in a gateway until `stop`, on connections of its own."""
    client = command_client(settings.redis_url)
    try:
        await run_pool(settings.model_copy(update={"pool": pool}), stop, catalog, client, standing_in=True)
    finally:
        await client.aclose()


async def run_pool(
    settings: "Settings", stop: asyncio.Event, catalog: Catalog, client: Redis, *, standing_in: bool = False
) -> None:
    """Run until `stop`; then the auditor writes what waits. `client` is for commands, of any pool."""
    blocking = blocking_client(settings.redis_url)
    try:
        await _run_loops(settings, stop, catalog, client, blocking, standing_in=standing_in)
    finally:
        await blocking.aclose()


async def _run_loops(
    settings: "Settings", stop: asyncio.Event, catalog: Catalog, client: Redis, blocking: Redis, *, standing_in: bool
) -> None:
    keys, leaving, tasks = Keys(settings.pool), LeavingTiers(time.monotonic), TaskRegistry()

    def policy() -> BatchPolicy:
        return leaving.kept(batch_policy(catalog.snapshot, settings))

    def tier_names() -> list[str]:
        return [tier.name for tier in policy().tiers]

    waker = Waker(blocking, keys)
    presence = Presence(client, keys, gone_ms=settings.gone_ms)
    service = ServiceWatch(presence, tier_names)
    batches = Batches(client, keys, lease_ms=settings.lease_ms)
    dispatcher = Dispatcher(batches, waker, lambda: without_paused(policy()), time.monotonic, lambda: service.service)
    caretaker = Caretaker(
        Endings(client, keys, lease_ms=settings.lease_ms),
        presence,
        tier_names,
        lambda: MIN_LEFT_MS,
        settings.reap_ms,
        standing_in=standing_in,
        notices=lambda: _notices(tasks),
        repair=IndexRepair(client, keys, lease_ms=settings.lease_ms),
    )
    auditor = _auditor(settings, Outbox(client, keys, uuid7().hex))
    quotas = QuotaKeeper(settings.database_url, QuotaRestore(client, keys), lambda: catalog.snapshot)
    cordons = CordonKeeper(Cordons(client, keys), lambda: _cordoned(catalog), time.monotonic)
    async with asyncio.TaskGroup() as group:
        roles: dict[str, Loop] = {
            "wake reader": waker.run,
            "dispatcher": dispatcher.run,
            "service times": service.run,
            "caretaker": caretaker.run,
            "quota keeper": quotas.run,
            "cordon keeper": cordons.run,
        }
        loops = [group.create_task(tasks.run_forever(name, loop)) for name, loop in roles.items()]
        group.create_task(tasks.run_forever("auditor", auditor.run, stop))
        await stop.wait()
        for loop in loops:
            loop.cancel()
        await auditor.stop()


def _notices(tasks: TaskRegistry) -> list[str]:
    """What health is told of this process."""
    name = f"{socket.gethostname()}-{os.getpid()}"
    return [f"scheduler {name}: {ended.sentence()}" for ended in tasks.ended]


def _cordoned(catalog: Catalog) -> frozenset[str] | None:
    """Whom PostgreSQL says to be cordoned; None where it was not heard of lately: another scheduler may know better."""
    return catalog.snapshot.cordoned if catalog.snapshot is not None and catalog.fresh else None


def _auditor(settings: "Settings", outbox: Outbox) -> Auditor:
    chores = ChorePolicy(
        deadline_s=settings.total_request_ms / 1000,
        job_deadline_s=settings.job_deadline_ms / 1000,
        grace_s=settings.audit_grace_ms / 1000,
    )
    interval_s = settings.audit_interval_ms / 1000
    # Not longer than until a row without an end is closed: what never ends must have one by then.
    hold = HoldPolicy(hold_s=2 * interval_s, deep_s=min(LONGEST_S, chores.deadline_s + chores.grace_s))
    policy = AuditPolicy(
        take_limit=settings.audit_batch, interval_s=interval_s, hold=hold, chores=chores, pool=settings.pool
    )
    return Auditor(settings.database_url, outbox, policy)
