"""Values of the observation of a pool, the wait of one customer or request, and the set of pools with unfinished requests.

`presence` and `batches` read observations. The set names pools in which requests may still be queued or running, for
processes that start when no model names the pool any more. Schedulers write it, gateways read it. It is in the same Redis
as the queues, so it is lost only together with them.
"""

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import msgspec
from redis.asyncio import Redis

from scheduler.redis_client.connections import bounded, tag_at
from scheduler.redis_client.keys import Keys, is_pool_name
from scheduler.states import BACKGROUND, background_of, tier_of

MAX_PLACES = 100_000
"""The length up to which a place is searched."""


class TierDepth(msgspec.Struct, array_like=True, frozen=True):
    """A tier queue or background queue, with its backlogs: its length, and the age of its oldest request (ms)."""

    name: str
    depth: int
    oldest_ms: float


def with_background(tiers: Sequence[str]) -> list[str]:
    """The names of the queues of these tiers: first those of interactive requests."""
    return [*tiers, *map(background_of, tiers)]


class SlotView(msgspec.Struct, array_like=True, frozen=True):
    """The slots of a pool: free ones without those of batches that wait for a claim, all, and the fewest free ones of a worker
    that has any.
    """

    free: int
    total: int
    fewest: int


class Queues(msgspec.Struct, array_like=True, frozen=True):
    """Queues and batches. `leased_batches`: ready and running ones; `healthy_gpus`: -1 if not counted.

    `quiet`: tiers in which quiet customers wait; `since_formed_ms`: since the last batch was formed, -1 if unknown. `slots`: None
    in a pool that runs batches.
    """

    now_ms: int
    tiers: list[TierDepth]
    ready_batches: int
    leased_batches: int
    healthy_gpus: int
    quiet: list[str] = []
    since_formed_ms: int = -1
    slots: SlotView | None = None

    @property
    def interactive(self) -> dict[str, TierDepth]:
        """The tier queues by tier."""
        return {queue.name: queue for queue in self.tiers if not queue.name.endswith(BACKGROUND)}

    @property
    def background(self) -> dict[str, TierDepth]:
        """The background queues by tier."""
        return {tier_of(queue.name): queue for queue in self.tiers if queue.name.endswith(BACKGROUND)}

    @property
    def depth(self) -> int:
        """Ids in all tier queues, dead entries included; without the background queues."""
        return sum(queue.depth for queue in self.tiers if not queue.name.endswith(BACKGROUND))


class GpuReading(msgspec.Struct, array_like=True, frozen=True):
    """A worker's GPU as reported by its driver: `utilization` 0..1, memory in MiB, temperature in degrees Celsius.

    `ecc_uncorrected`: memory errors since the driver was loaded. `fault`: why it must not get requests, or "". `note`: a
    memory problem that the operator should know, although the GPU works. `name`: its model. `address`: its PCI bus id.
    """

    utilization: float
    memory_used_mb: int
    memory_total_mb: int
    temperature_c: int
    ecc_uncorrected: int
    fault: str = ""
    note: str = ""
    name: str = ""
    address: str = ""


class WorkerReport(msgspec.Struct, array_like=True, frozen=True):
    """The heartbeat of a worker. `rps`: its measured rate with the largest batches (0: not measured yet).

    A batch of n takes about `base_ms` + n x `item_ms`, measured with batches up to `seen_batch` (0: not measured). With slots,
    `base_ms` is the mean time of a request in a slot, `item_ms` is 0, `seen_batch` is the mean number of requests that ran,
    `width` equals `slots`, `service_p95_ms` is the p95 of that time, and `rps` is `slots` divided by its mean.
    """

    id: str
    status: str  # starting | ready | busy | paused | away | slow | cordoned | draining | down | quarantined | failed
    utilization: float
    in_flight: int
    rps: float
    service_p95_ms: float
    backend: str
    model_version: str
    direct: str = ""  # host:port of its direct endpoint; "": none.
    base_ms: float = 0.0
    item_ms: float = 0.0
    seen_batch: float = 0.0
    gpu: GpuReading | None = None  # None: no GPU, or no information about it.
    padding_waste: float = 0.0  # Share of padding in the computation of recent batches.
    model_pid: int = 0  # Process id of its model process; 0: none.
    width: int = 1  # Concurrent batches.
    fresh_batch: float = 0.0  # The largest recent batches.
    served_rps: float = 0.0  # Requests/s of its recent runs.
    model_ms: float = 0.0  # Time of its last batch over the cap, or of the last trial batch; 0: not measured.
    timeout_ms: float = 0.0  # The cap of a batch.
    slots: int = 0  # Requests that may run at a time, each started and ended by itself; 0: it runs batches.
    slots_source: str = ""  # The evidence for that number.
    free_slots: int = -1  # -1: not known, because a claim is in progress.
    context_tokens: int = 0  # The most of prompt and output together; 0: not known, or not counted in tokens.
    reason: str = ""  # Why its model's server is not available, or what is wrong with it; "": nothing.
    cause: str = ""  # The cause of `reason`, one of a fixed list; "": none, or not known.
    host: str = ""  # The name of its host; "": not reported, as by older workers.
    pid: int = 0  # Its process id on that host.


class WorkerView(WorkerReport, array_like=False, frozen=True, kw_only=True):
    """A worker: its last heartbeat, the age of that, and whether it is healthy.

    `pausing`: it accepts no batches for a short time, as it reported. It has no capacity meanwhile, but is not a problem.
    """

    age_ms: float
    healthy: bool
    pausing: bool = False


class TierStats(msgspec.Struct, array_like=True, frozen=True):
    """One tier at one gateway: offered requests/s, those rejected for lack of capacity, and percentiles of the response time in ms
    (0: none).

    `factor` (0..1): the share of base limits that each customer of the tier has at this gateway. `allocated_rps`: the tier's
    part of the capacity. `answered_rps`: the measured rate of responses. `retries_rps`: offered requests that are marked as
    retries. `shadowed_rps`: requests that a shadow tier would have rejected. `failed_rps`: SLO failures, including rejections
    for lack of capacity. `unreduced_rps`: an upper bound of the demand that clients would have without reduced limits (0: not
    known). `recent_rps`: the demand of the last half second.
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
    unreduced_rps: float = 0.0
    recent_rps: float = 0.0


class TierOutcomes(msgspec.Struct, array_like=True, frozen=True):
    """Ended requests of one tier at one gateway. `failed`: errors and timeouts that the client did not cause, without
    rejections for lack of capacity; `codes_60s`: the same by error code. `budget`: all requests, and those that use the error
    budget, rejections for lack of capacity included. `others_60s`: by error code, these rejections, and errors that clients caused.
    """

    completed_10s: int = 0
    failed_10s: int = 0
    completed_60s: int = 0
    codes_60s: dict[str, int] = {}
    budget_5m: tuple[int, int] = (0, 0)
    budget_1h: tuple[int, int] = (0, 0)
    others_60s: dict[str, int] = {}

    @property
    def failed_60s(self) -> int:
        return sum(self.codes_60s.values())


class CustomerRate(msgspec.Struct, array_like=True, frozen=True):
    """One of the customers with the highest rates at a gateway: name, tier, and valid requests/s."""

    name: str
    tier: str
    rps: float


class CustomerGpuTime(msgspec.Struct, array_like=True, frozen=True):
    """The GPU time of a customer at a gateway in the last minute, of interactive requests. `waiting`: the mean number of its
    requests in the queue. `unmet`: those that failed for lack of capacity or other faults of the service. `customer_id`: of one
    with many of them.
    """

    name: str
    tier: str
    weight: float
    gpu_ms: float
    waiting: float
    unmet: int
    customer_id: str = ""


class GatewayStats(msgspec.Struct, array_like=True, frozen=True):
    """The heartbeat of a gateway. Batches are those of which it received replies. `filled_per_second`: their sum in units of full
    batches; a half full one counts as 0.5.
    """

    gateway_id: str
    requests_per_second: float
    tiers: dict[str, TierStats]
    capacity_rps: float = 0.0  # The capacity that it allocates now.
    batches_per_second: float = 0.0
    filled_per_second: float = 0.0
    busiest: list[CustomerRate] = []
    capacity_evidence: str = ""
    """The source of the capacity: fixed, measured, probing, prior; "" if not reported."""
    capacity_confidence: float = 0.0  # 0..1: how full the measured batches are.
    capacity_correction: float = 1.0  # Factor of the rates that workers report.
    ended_tasks: list[str] = []  # Background tasks of its process that ended, in sentences.
    outcomes: dict[str, TierOutcomes] = {}  # By tier.
    gpu_ms: dict[str, float] = {}  # GPU time of each tier in the last minute.
    gpu_times: list[CustomerGpuTime] = []  # Customers that used or wait the most.
    refused: list[int] = []  # Numbers of customers all of whose requests the model refused lately.
    served: list[int] = []  # Numbers of those whose requests it answered.
    failed: list[tuple[str, int, int]] = []  # (Name, number, requests) of customers with runs that failed lately.


class Observation(msgspec.Struct, frozen=True):
    """A pool at one time, read atomically.

    Ages: of each gateway's last heartbeat, of the last pass of a scheduler, and of the last pass of any process, which may be
    a gateway that replaces the schedulers (None: unknown). `notices`: recent problems that schedulers report.
    `background`: the background queue of each tier. `epoch_us`: when this Redis was first used; if it changes, data was lost.
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
    background: dict[str, TierDepth] = {}
    epoch_us: int = 0

    @property
    def healthy_gpus(self) -> int:
        return sum(worker.healthy for worker in self.workers)

    @property
    def total_gpus(self) -> int:
        return len(self.workers)


def with_moving(seen: Observation, before: Observation | None) -> Observation:
    """An observation of a cell, with the workers that have left it since the one before, as they were then.

    They probably serve another cell, whose last observation may be too old to have them.
    """
    if before is None:
        return seen
    here = [worker for worker in seen.workers if worker.status != "draining"]
    known = {worker.id for worker in here}
    left = [worker for worker in before.workers if worker.healthy and worker.id not in known]
    return msgspec.structs.replace(seen, workers=[*here, *left]) if left else seen


def combined(cells: Sequence[Observation]) -> Observation:
    """One observation of a pool from those of its cells, the gateway's view of a single queue. Ages are those of the first.

    A worker that has just moved is in the cell that it serves: in the former one it is draining. Gateways have one entry for
    each cell.
    """
    first, *others = cells
    if not others:
        return first
    workers: dict[str, WorkerView] = {}
    for cell in cells:
        for worker in cell.workers:
            known = workers.get(worker.id)
            if known is None or (worker.healthy, -worker.age_ms) > (known.healthy, -known.age_ms):
                workers[worker.id] = worker
    return msgspec.structs.replace(
        first,
        tiers=_summed([cell.tiers for cell in cells]),
        background=_summed([cell.background for cell in cells]),
        workers=list(workers.values()),
        gateways=[stats for cell in cells for stats in cell.gateways],
        ready_batches=sum(cell.ready_batches for cell in cells),
        leased_batches=sum(cell.leased_batches for cell in cells),
    )


def _summed(several: Sequence[dict[str, TierDepth]]) -> dict[str, TierDepth]:
    total: dict[str, TierDepth] = {}
    for tiers in several:
        for name, tier in tiers.items():
            known = total.get(name, TierDepth(name, 0, 0.0))
            total[name] = TierDepth(name, known.depth + tier.depth, max(known.oldest_ms, tier.oldest_ms))
    return total


class CustomerQueue(msgspec.Struct, frozen=True):
    """Requests of a customer that wait for places in a tier queue or background queue. `debt_ms`: GPU time that others of the
    queue receive first, multiplied by their weight divided by its own; 0: it is next.
    """

    queue: str
    backlog: int
    debt_ms: float


class QueuePlace(msgspec.Struct, frozen=True):
    """The place of a waiting request, 1 first, among `of` in the tier queue or, if `in_backlog`, in its customer's backlog.
    Requests that have ended count until they are skipped.
    """

    place: int
    of: int
    in_backlog: bool


class WaitingView:
    """What waits where: for explanations only, because a place is found in O(length). All methods raise RedisUnavailable."""

    def __init__(self, client: Redis, keys: Keys) -> None:
        self._client = client
        self._keys = keys

    async def customer(self, tier: str, customer_id: str, weight: float) -> list[CustomerQueue]:
        """The customer's backlogs, interactive and background."""
        keys, names = self._keys, (tier, background_of(tier))
        async with bounded(self._client):
            pipeline = self._client.pipeline(transaction=True)
            for name in names:
                pipeline.llen(keys.backlog(name, customer_id))
                pipeline.zscore(keys.backlogs(name), customer_id)
                pipeline.hget(keys.flow(name, customer_id), "tag")
                pipeline.hget(keys.fair(name), "v")
            found = await pipeline.execute()
        queues: list[CustomerQueue] = []
        for name, (backlog, score, tag, virtual) in zip(names, (found[:4], found[4:]), strict=True):
            debt = float(tag or 0 if score is None else score) - float(virtual or 0)
            queues.append(CustomerQueue(name, backlog, round(max(0.0, debt) * weight, 3)))
        return queues

    async def request(self, queue: str, customer_id: str, request_id: str) -> QueuePlace | None:
        """The place of a request; None if it does not wait, or follows the run of an equal one."""
        lists = (self._keys.queue(queue), self._keys.backlog(queue, customer_id))
        async with bounded(self._client):
            pipeline = self._client.pipeline(transaction=True)
            for name in lists:
                pipeline.llen(name)
                pipeline.lpos(name, request_id, rank=-1, maxlen=MAX_PLACES)
            found = await pipeline.execute()
        for in_backlog, (length, index) in ((False, found[:2]), (True, found[2:])):
            if index is not None:
                return QueuePlace(length - index, length, in_backlog)
        return None


class Remaining(NamedTuple):
    """Requests that wait, jobs included; requests in formed and running batches, and followers of equal requests; and records
    for the audit.
    """

    waiting: int = 0
    running: int = 0
    unwritten: int = 0


class Unfinished:
    """The pools with unfinished requests. All methods raise RedisUnavailable."""

    def __init__(self, client: Redis) -> None:
        self._client = client
        self._key = Keys(tag=tag_at(client)).pools

    async def pools(self) -> set[str]:
        """The pools that must be served, whether or not a model names them."""
        async with bounded(self._client):
            members: Any = await self._client.smembers(self._key)
        return {name for name in (member.decode("utf-8", "replace") for member in members) if is_pool_name(name)}

    async def note(self, kept: Collection[str], over: Collection[str]) -> None:
        """Add and remove pools."""
        async with bounded(self._client):
            pipeline = self._client.pipeline(transaction=True)
            if kept:
                pipeline.sadd(self._key, *kept)
            if over:
                pipeline.srem(self._key, *over)
            await pipeline.execute()

    async def is_empty(self, keys: Keys, tiers: Collection[str]) -> bool:
        """Whether the pool has no queued or running requests, and no records to be written to the audit."""
        return not any(await self.remaining(keys, tiers))

    async def remaining(self, keys: Keys, tiers: Collection[str]) -> Remaining:
        """What is not finished in the pool."""
        names = with_background(list(tiers))
        async with bounded(self._client):
            pipeline = self._client.pipeline(transaction=True)
            for name in (*map(keys.queue, names), keys.outbox):
                pipeline.llen(name)
            pipeline.mget([keys.waiting(name) for name in names])
            pipeline.zrange(keys.leases, 0, -1)
            pipeline.lrange(keys.batch_queue, 0, -1)
            pipeline.zcard(keys.sharing)
            pipeline.smembers(keys.auditors)
            *sizes, waiting, leased, ready, sharing, auditors = await pipeline.execute()
            *depths, outbox = sizes
            batches = {*leased, *ready}
            for batch in batches:
                pipeline.hget(keys.batch(batch.decode()), "size")
            for auditor in auditors:
                pipeline.llen(keys.auditor_outbox(auditor.decode()))
            found = await pipeline.execute()
        running = [int(size or 1) for size in found[: len(batches)]]
        return Remaining(
            sum(depths) + sum(int(each or 0) for each in waiting),
            sum(running) + sharing,
            outbox + sum(found[len(batches) :]),
        )
