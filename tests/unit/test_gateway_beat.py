"""The heartbeat: what goes with it, what comes of it, and what is left when it fails."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import msgspec

from gateway.heartbeat import GatewayHeartbeat
from gateway.limits.capacity import HOLD_S, REFILL_S, LiveLimits
from gateway.limits.demand import DemandMeter
from ledger.catalog.snapshot import Model, Snapshot, Tier
from scheduler.errors import RedisUnavailable
from scheduler.protocol.limits import RejectionRecord
from scheduler.protocol.pool_view import GatewayStats, Observation, WorkerView
from scheduler.protocol.presence import BeatReply

TINY = Model("tiny", "default", 32, None, 40, 3000, 100.0, 1.0, 0, True)
TIERS = (
    Tier("enterprise", 1, 0.05, (100.0, 200.0, 8, None), 500, 2000, None, None),
    Tier("free", 3, 0.10, (10.0, 20.0, 8, None), 500, 2000, None, None),
)
SNAPSHOT = Snapshot(1, TIERS, {}, {}, {"tiny": TINY}, ())
WORKER = WorkerView("w", "busy", 0.9, 1, 10.0, True, 100.0, 50.0, "tiny", "v1")


class Pool:
    """A presence that keeps what it is told, and shows one worker."""

    def __init__(self) -> None:
        self.told: list[GatewayStats] = []
        self.refusals: list[RejectionRecord] = []
        self.away = False
        self.epoch_us = 7
        self.workers = [WORKER]

    async def gateway_beat(self, stats: GatewayStats, refusals: Sequence[RejectionRecord] = ()) -> BeatReply:
        if self.away:
            raise RedisUnavailable("no answer")
        self.told.append(stats)
        self.refusals += refusals
        return BeatReply(self.epoch_us, 0.5)

    async def observe(self, tiers: Sequence[str]) -> Observation:
        assert list(tiers) == ["enterprise", "free"]
        return Observation(5000, {}, self.workers, self.told[-1:], 0, 0, 0, 0)


class Listener:
    """Counts."""

    def __init__(self) -> None:
        self.epochs: list[int] = []
        self.misses = 0

    def heartbeat(self, epoch_us: int) -> None:
        self.epochs.append(epoch_us)

    def missed(self) -> None:
        self.misses += 1


def beating(**more: Any) -> tuple[GatewayHeartbeat, Pool, LiveLimits, DemandMeter, Listener, list[float]]:
    pool, limits, demand_meter, listener, now = Pool(), LiveLimits("default"), DemandMeter("g1", 0.0), Listener(), [0.0]
    catalog: Any = SimpleNamespace(snapshot=SNAPSHOT)
    heartbeat = GatewayHeartbeat(pool, catalog, limits, demand_meter, listener=listener, clock=lambda: now[0], **more)
    return heartbeat, pool, limits, demand_meter, listener, now


async def test_a_beat_tells_what_was_metered_and_what_is_shared_out() -> None:
    """What is published now is what was allocated with the last look, and the next look makes new limits of it."""
    heartbeat, pool, limits, demand_meter, listener, now = beating()
    for _ in range(200):
        demand_meter.arrived("free", "acme")
        demand_meter.passed("free", 1.0, 1.0)
    now[0] = 1.0
    await heartbeat.heartbeat()
    now[0] = 1.25
    await heartbeat.heartbeat()

    first, second = (stats.tiers["free"] for stats in pool.told)
    assert (first.demand_rps, first.factor, first.allocated_rps) == (200.0, 1.0, 0.0)
    assert (second.demand_rps, second.factor, second.allocated_rps) == (160.0, 0.5, 100.0)
    assert [stats.capacity_rps for stats in pool.told] == [0.0, 100.0]
    assert limits.factor("free") == 0.5 + 0.25 * 0.25  # On its way to 100 of 160.
    assert (limits.memory_share, listener.epochs, heartbeat.age_s()) == (0.5, [7, 7], 0.0)


async def test_refusals_go_with_the_beat() -> None:
    """Each once, oldest first, as they are handed over."""
    kept = [
        RejectionRecord(id=f"req_{n}", customer_id="c", key_id="k", tier="free", code="queue_full") for n in range(3)
    ]

    def drain() -> list[RejectionRecord]:
        drained, kept[:] = list(kept), []
        return drained

    heartbeat, pool, *_ = beating(refusals=drain)
    await heartbeat.heartbeat()
    await heartbeat.heartbeat()

    assert [refusal.id for refusal in pool.refusals] == ["req_0", "req_1", "req_2"]


async def test_a_missed_beat_holds_the_limits_then_falls_to_the_floor() -> None:
    """The last look stays, the listener hears of it, and health has the reason."""
    heartbeat, pool, limits, _, listener, now = beating()
    await heartbeat.heartbeat()
    pool.away = True
    now[0] = HOLD_S
    await heartbeat.heartbeat()
    assert (heartbeat.redis_problem, heartbeat.age_s(), listener.misses) == ("no answer", HOLD_S, 1)
    assert (limits.memory_share, limits.healthy_gpus) == (0.5, 1)
    now[0] = HOLD_S + 0.1
    await heartbeat.heartbeat()

    assert (limits.memory_share, limits.capacity_rps) == (0.0, 100.0)
    pool.away = False
    await heartbeat.heartbeat()
    assert heartbeat.redis_problem is None


async def test_a_redis_that_was_emptied_does_not_lower_the_capacity() -> None:
    """It knows its workers again one by one: the capacity, and what it gives each tier, holds until all are back."""
    heartbeat, pool, limits, _, _, now = beating()
    both = [WORKER, msgspec.structs.replace(WORKER, id="w2")]
    pool.workers = both
    await heartbeat.heartbeat()
    whole = limits.capacity_rps

    pool.epoch_us, seen = 8, []
    for workers in ([], both[:1], both):
        pool.workers = workers
        now[0] += 0.25
        await heartbeat.heartbeat()
        seen.append((limits.capacity_rps, limits.healthy_gpus))

    assert seen == [(whole, 2)] * 3


async def test_a_worker_that_is_not_back_after_a_second_is_gone() -> None:
    """What was known before is believed as long as a silent worker is; without a loss it is not believed at all."""
    heartbeat, pool, limits, _, _, now = beating()
    pool.workers = [WORKER, msgspec.structs.replace(WORKER, id="w2")]
    await heartbeat.heartbeat()
    pool.epoch_us, pool.workers = 8, [WORKER]
    await heartbeat.heartbeat()
    assert limits.healthy_gpus == 2

    now[0] += REFILL_S
    await heartbeat.heartbeat()
    assert limits.healthy_gpus == 1

    pool.workers = []
    await heartbeat.heartbeat()
    assert limits.healthy_gpus == 0
