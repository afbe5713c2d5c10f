"""What is seen of pools: the values of an observation, and the pools with unfinished work.

`presence` and `batches` fetch observations. Pools in which something may still wait are a set in Redis, for processes
that start when no model names the pool any more. It lives where the queues live, so it is lost only together with them.
Schedulers write it, gateways read it.
"""

from collections.abc import Collection
from typing import Any

import msgspec
from redis.asyncio import Redis

from scheduler.redis_client.connections import bounded
from scheduler.redis_client.keys import Keys, is_pool_name


class TierDepth(msgspec.Struct, array_like=True, frozen=True):
    """A tier queue: how many ids it holds and how long the oldest has waited (ms)."""

    name: str
    depth: int
    oldest_ms: float


class Queues(msgspec.Struct, array_like=True, frozen=True):
    """What waits and what runs. `leased_batches` counts ready and running ones; `healthy_gpus` is -1 where not counted."""

    now_ms: int
    tiers: list[TierDepth]
    ready_batches: int
    leased_batches: int
    healthy_gpus: int

    @property
    def depth(self) -> int:
        """Ids in all tier queues, dead entries included."""
        return sum(tier.depth for tier in self.tiers)


class GpuReading(msgspec.Struct, array_like=True, frozen=True):
    """What the driver says of a worker's GPU: `utilization` 0..1, memory in MiB, temperature in degrees Celsius.

    `ecc_uncorrected` counts errors of its memory since the driver was loaded. `fault` is why it must get no more work, "" where
    it may; `note` what whoever looks after the machine should know of its memory, though it works.
    """

    utilization: float
    memory_used_mb: int
    memory_total_mb: int
    temperature_c: int
    ecc_uncorrected: int
    fault: str = ""
    note: str = ""


class WorkerReport(msgspec.Struct, array_like=True, frozen=True):
    """What a worker says of itself. `rps` is its measured rate at the largest batch it takes (0: not measured yet).

    A batch of n takes about `base_ms` + n x `item_ms`, which was measured up to batches of `seen_batch` (0: not at all).
    """

    id: str
    status: str  # starting | ready | busy | paused | away | cordoned | draining | down | quarantined | failed
    utilization: float
    in_flight: int
    rps: float
    service_p95_ms: float
    backend: str
    model_version: str
    direct: str = ""  # host:port of its direct endpoint; "": it has none.
    base_ms: float = 0.0
    item_ms: float = 0.0
    seen_batch: float = 0.0
    gpu: GpuReading | None = None  # None: on no GPU, or on one that nothing is known of.
    padding_waste: float = 0.0  # Share of what its late batches computed that was padding.
    model_pid: int = 0  # Of its model process on its host; 0: there is none now.
    width: int = 1  # Batches that run at a time.
    fresh_batch: float = 0.0  # The largest batches that ran lately.
    served_rps: float = 0.0  # Requests/s over its last completed runs.


class WorkerView(msgspec.Struct, frozen=True):
    """A worker as others see it: its last beat, how old that is, and whether it counts as healthy.

    `pausing`: it takes nothing for a moment, and says so. It has no capacity now, and nobody needs to be called for it.
    """

    id: str
    status: str
    utilization: float
    in_flight: int
    age_ms: float
    healthy: bool
    rps: float
    service_p95_ms: float
    backend: str
    model_version: str
    direct: str = ""
    base_ms: float = 0.0
    item_ms: float = 0.0
    seen_batch: float = 0.0
    gpu: GpuReading | None = None
    padding_waste: float = 0.0
    pausing: bool = False
    model_pid: int = 0
    width: int = 1
    fresh_batch: float = 0.0
    served_rps: float = 0.0


class TierStats(msgspec.Struct, array_like=True, frozen=True):
    """One tier as one gateway sees it: offered and shed requests/s, and percentiles of the answer time in ms (0: none).

    `factor` (0..1) is the part of its base limits that each customer of the tier has at this gateway, `allocated_rps` the
    tier's part of the capacity. `answered_rps` is the measured drain, `retries_rps` how many of the offered requests said
    that they were tried before, `shadowed_rps` what would have been refused were the tier's limits in force. `failed_rps` are
    calls that ended badly by our fault, refusals for want of capacity among them.
    """

    demand_rps: float
    shed_per_second: float
    p95_ms: float
    factor: float = 1.0
    allocated_rps: float = 0.0
    answered_rps: float = 0.0
    arrived_rps: float = 0.0
    retries_rps: float = 0.0
    shadowed_rps: float = 0.0
    p50_ms: float = 0.0
    p99_ms: float = 0.0
    failed_rps: float = 0.0


class CustomerRate(msgspec.Struct, array_like=True, frozen=True):
    """One of the customers that ask most at a gateway, by name, and its valid requests/s."""

    name: str
    tier: str
    rps: float


class GatewayStats(msgspec.Struct, array_like=True, frozen=True):
    """What a gateway says of itself with every beat. Batches are those that it had answers of, `filled_per_second` how many
    full ones they come to: one that is half full is half a batch.
    """

    gateway_id: str
    requests_per_second: float
    tiers: dict[str, TierStats]
    capacity_rps: float = 0.0  # What it shares out now.
    batches_per_second: float = 0.0
    filled_per_second: float = 0.0
    busiest: list[CustomerRate] = []
    capacity_evidence: str = (
        ""  # What the capacity is derived from: fixed, measured, probing, prior; "" where not said.
    )
    capacity_confidence: float = 0.0  # 0..1: how near to full the measured batches are.
    capacity_correction: float = 1.0  # Times the rates that the workers report.
    ended_tasks: list[str] = []  # Endless tasks of its process that ended, in sentences.


class Observation(msgspec.Struct, frozen=True):
    """One atomic look at a pool. Ages: of each gateway's last heartbeat, and of the last pass of any scheduler, and of the last
    pass at all, which may be that of a gateway that stands in for them (None: unknown). `notices`: what schedulers say of
    themselves lately, where something is wrong.
    """

    now_ms: int
    tiers: dict[str, TierDepth]
    workers: list[WorkerView]
    gateways: list[GatewayStats]
    ready_batches: int
    leased_batches: int
    outbox: int
    dlq: int
    gateway_ages_ms: dict[str, float] = {}
    scheduler_age_ms: float | None = 0.0
    pass_age_ms: float | None = 0.0
    notices: list[str] = []

    @property
    def healthy_gpus(self) -> int:
        return sum(worker.healthy for worker in self.workers)

    @property
    def total_gpus(self) -> int:
        return len(self.workers)


class Unfinished:
    """All raise RedisUnavailable."""

    def __init__(self, client: Redis) -> None:
        self._client = client
        self._key = Keys().pools

    async def pools(self) -> set[str]:
        """The pools that somebody should serve, named by a model or not."""
        async with bounded():
            members: Any = await self._client.smembers(self._key)
        return {name for name in (member.decode("utf-8", "replace") for member in members) if is_pool_name(name)}

    async def note(self, kept: Collection[str], over: Collection[str]) -> None:
        """Add some, and take others out."""
        async with bounded():
            pipeline = self._client.pipeline(transaction=True)
            if kept:
                pipeline.sadd(self._key, *kept)
            if over:
                pipeline.srem(self._key, *over)
            await pipeline.execute()

    async def is_empty(self, keys: Keys, tiers: Collection[str]) -> bool:
        """Whether in this pool nothing waits, runs, or is still to be written into the audit."""
        async with bounded():
            pipeline = self._client.pipeline(transaction=True)
            for name in (*map(keys.queue, tiers), keys.batch_queue, keys.outbox):
                pipeline.llen(name)
            for name in (keys.leases, keys.sharing):
                pipeline.zcard(name)
            pipeline.smembers(keys.auditors)
            *sizes, auditors = await pipeline.execute()
            for auditor in auditors:
                pipeline.llen(keys.auditor_outbox(auditor.decode()))
            return not any(sizes) and not any(await pipeline.execute())
