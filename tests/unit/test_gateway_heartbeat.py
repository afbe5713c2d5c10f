"""The heartbeat: what a gateway publishes and observes, what follows from it, and what happens when it fails."""

import asyncio
import gc
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from configs import GONE_MS
from gateway.heartbeat import KEEP_WORKERS_S, GatewayHeartbeat
from gateway.limits.capacity import HOLD_S, LiveLimits
from gateway.limits.demand import DemandMeter
from ledger.catalog.snapshot import Model, Snapshot, Tier
from scheduler.errors import RedisUnavailable
from scheduler.protocol.limits import RejectionRecord
from scheduler.protocol.pool_view import GatewayStats, Observation, WorkerView
from scheduler.protocol.presence import BeatReply

TINY = Model("tiny", "default", 32, None, 40, 100.0, 1.0, 0, True)
TIERS = (
    Tier("enterprise", 1, 0.05, (100.0, 200.0, 8, None), 500, 2000, None, None),
    Tier("free", 3, 0.10, (10.0, 20.0, 8, None), 500, 2000, None, None),
)
SNAPSHOT = Snapshot(1, TIERS, {}, {}, {"tiny": TINY}, ())
WORKER = WorkerView("w1", "busy", 0.9, 1, 100.0, 50.0, "tiny", "v1", age_ms=10.0, healthy=True)
WORKERS = [WORKER, msgspec.structs.replace(WORKER, id="w2")]


class Setup:
    """A heartbeat over a fake Redis with these workers, on a virtual clock. It is its own listener."""

    gone_ms = GONE_MS

    def __init__(self, workers: Sequence[WorkerView] = (WORKER,), **options: Any) -> None:
        self.now, self.away, self.epoch_us, self.workers = 0.0, False, 7, list(workers)
        self.published: list[GatewayStats] = []
        self.rejections: list[RejectionRecord] = []
        self.epochs: list[int] = []
        self.misses = 0
        self.limits, self.meter = LiveLimits("default"), DemandMeter("g1", 0.0)
        self.sender = GatewayHeartbeat(
            self,
            SimpleNamespace(snapshot=SNAPSHOT),
            self.limits,
            self.meter,
            listener=self,
            clock=lambda: self.now,
            **options,
        )

    async def beat(self, now: float | None = None) -> None:
        self.now = self.now if now is None else now
        await self.sender.heartbeat()

    async def gateway_beat(self, stats: GatewayStats, rejections: Sequence[RejectionRecord] = ()) -> BeatReply:
        if self.away:
            raise RedisUnavailable("no answer")
        self.published.append(stats)
        self.rejections += rejections
        return BeatReply(self.epoch_us, 0.5)

    async def observe(self, tiers: Sequence[str]) -> Observation:
        assert list(tiers) == ["enterprise", "free"]
        return Observation(5000, {}, self.workers, self.published[-1:], 0, 0, 0, 0)

    def heartbeat(self, epoch_us: int) -> None:
        self.epochs.append(epoch_us)

    def missed(self) -> None:
        self.misses += 1


async def test_it_publishes_demand_and_allocation() -> None:
    """The allocation of the previous observation is published, and each observation gives new limits."""
    setup = Setup()
    for _ in range(200):
        setup.meter.arrived("free", "acme")
        setup.meter.passed("free")
    await setup.beat(1.0)
    await setup.beat(1.25)

    first, second = (stats.tiers["free"] for stats in setup.published)
    assert (first.demand_rps, first.factor, first.allocated_rps) == (200.0, 1.0, 0.0)
    assert (second.demand_rps, second.factor, second.allocated_rps) == (160.0, 0.5, 100.0)
    assert [stats.capacity_rps for stats in setup.published] == [0.0, 100.0]
    assert setup.limits.factor("free") == 0.5 + 0.25 * 0.25  # Relaxing to 100 of 160.
    assert (setup.limits.memory_share, setup.epochs, setup.sender.age_s()) == (0.5, [7, 7], 0.0)


async def test_rejections_are_published_once() -> None:
    """In the order of the log."""
    records = [
        RejectionRecord(id=f"req_{n}", customer_id="c", key_id="k", tier="free", code="queue_full") for n in range(3)
    ]
    batches = iter([records])
    setup = Setup(rejections=lambda: next(batches, []))
    await setup.beat()
    await setup.beat()

    assert setup.rejections == records


async def test_a_heartbeat_that_is_cancelled_before_it_is_sent_keeps_the_rejections() -> None:
    """Then nothing was sent, no call is left without an await, and the next heartbeat has what this one would have sent."""
    batches = iter([[RejectionRecord(id="req_1", customer_id="c", key_id="k", tier="free", code="queue_full")]])
    setup = Setup(rejections=lambda: next(batches, []))
    heartbeat = asyncio.create_task(setup.beat())
    await asyncio.sleep(0)  # Both calls are due and have not begun.
    heartbeat.cancel()
    await asyncio.gather(heartbeat, return_exceptions=True)
    gc.collect()
    assert (heartbeat.cancelled(), setup.published) == (True, [])

    await setup.beat()
    assert [record.id for record in setup.rejections] == ["req_1"]


async def test_a_missed_heartbeat_holds_the_limits_for_a_while() -> None:
    """Then they fall to one GPU. Listener and health get the failure."""
    setup = Setup()
    await setup.beat()
    setup.away = True
    await setup.beat(HOLD_S)
    assert (setup.sender.redis_problem, setup.sender.age_s(), setup.misses) == ("no answer", HOLD_S, 1)
    assert (setup.limits.memory_share, setup.limits.healthy_gpus) == (0.5, 1)
    await setup.beat(HOLD_S + 0.1)
    assert (setup.limits.memory_share, setup.limits.capacity_rps) == (0.0, 100.0)

    setup.away = False
    await setup.beat()
    assert setup.sender.redis_problem is None


async def test_capacity_is_held_while_an_emptied_redis_learns_its_workers() -> None:
    """Under a new epoch the previous workers count for a second; without a loss a missing worker is gone at once."""
    setup = Setup(WORKERS)
    await setup.beat()
    whole = setup.limits.capacity_rps

    setup.epoch_us, held = 8, []
    for count in (0, 1, 2):
        setup.workers = WORKERS[:count]
        await setup.beat(setup.now + 0.25)
        held.append((setup.limits.capacity_rps, setup.limits.healthy_gpus, setup.limits.registering))
    assert held == [(whole, 2, True), (whole, 2, True), (whole, 2, False)]

    setup.epoch_us, setup.workers = 9, WORKERS[:1]
    await setup.beat()
    assert setup.limits.healthy_gpus == 2
    await setup.beat(setup.now + GONE_MS / 1000)
    assert setup.limits.healthy_gpus == 1
    setup.workers = []
    await setup.beat()
    assert setup.limits.healthy_gpus == 0


async def test_a_pool_without_workers_passes_chats_on_as_before() -> None:
    """A restart of all workers takes no capability from a model; before the first one nothing is known."""
    endpoint = msgspec.structs.replace(WORKER, backend="openai:http://x")
    setup, found = Setup([]), []
    for workers in ([], [endpoint], [], [endpoint, WORKER], []):
        setup.workers = workers
        await setup.beat()
        found.append(setup.sender.passes_on)

    assert found == [None, True, True, False, False]


@pytest.mark.parametrize(
    ("here", "elsewhere", "called"),
    [(["w1"], ["w3"], ["w1"]), ([], ["w3"], ["w3"]), ([], None, []), (["w1"], None, ["w1"])],
)
async def test_direct_mode_calls_the_workers_of_its_cell_first(
    here: list[str], elsewhere: list[str] | None, called: list[str]
) -> None:
    """Those of other cells only if this one had none, so that the customers of the others keep theirs."""
    other = Setup([msgspec.structs.replace(WORKER, id=name) for name in elsewhere or ()])
    seen = [] if elsewhere is None else [await other.observe(["enterprise", "free"])]
    setup = Setup([msgspec.structs.replace(WORKER, id=name) for name in here], others=lambda: seen)
    assert list(setup.sender.workers) == list(seen[0].workers if seen else ())
    await setup.beat(1.0)

    assert [worker.id for worker in setup.sender.workers] == called


async def test_direct_mode_calls_the_workers_of_a_cell_whose_redis_has_lost_them() -> None:
    """They register again within two seconds; only then does it call those of other cells, whose customers need them."""
    elsewhere = await Setup([msgspec.structs.replace(WORKER, id="w3")]).observe(["enterprise", "free"])
    setup = Setup(WORKERS, others=lambda: [elsewhere])
    called = []
    for epoch_us, workers, at in (
        (7, WORKERS, 1.0),
        (8, [], 1.25),
        (8, WORKERS[:1], 1.5),
        (8, [], 1.25 + KEEP_WORKERS_S - 0.01),
        (8, [], 1.25 + KEEP_WORKERS_S),
        (8, WORKERS, 9.0),
        (8, [], 9.25),
    ):
        setup.epoch_us, setup.workers = epoch_us, workers
        await setup.beat(at)
        called.append([worker.id for worker in setup.sender.workers])

    assert called == [["w1", "w2"], ["w1", "w2"], ["w1"], ["w1"], ["w3"], ["w1", "w2"], ["w3"]]


@pytest.mark.parametrize(("has_others", "whole", "own"), [(False, [2, 1, 1], [2, 1, 1]), (True, [3, 3, 2], [2, 2, 1])])
async def test_a_worker_that_moves_counts_until_its_new_cell_is_observed(
    has_others: bool, whole: list[int], own: list[int]
) -> None:
    """With one cell it is gone at once. `observed` receives it too, for the limits of the other cells."""
    elsewhere = await Setup([msgspec.structs.replace(WORKER, id="w3")]).observe(["enterprise", "free"])
    recorded: list[Observation | None] = []
    setup = Setup(WORKERS, others=lambda: [elsewhere] if has_others else [], observed=recorded.append)
    counts = []
    for workers in (WORKERS, WORKERS[:1], WORKERS[:1]):
        setup.workers = workers
        await setup.beat()
        assert setup.sender.whole is not None
        counts.append(setup.sender.whole.healthy_gpus)

    assert counts == whole
    assert [seen.healthy_gpus for seen in recorded if seen is not None] == own
