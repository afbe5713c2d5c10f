"""Bugs of limits and clocks: buckets that drift, or are all full after a flush, and counts that nobody keeps."""

import random
import time

import pytest

from gateway.limits.capacity import HOLD_S, WAITING_ROOM_S, LiveLimits
from key_leaks import leaked_keys
from ledger.catalog.snapshot import Model, Snapshot, Tier
from pool import TIERS, WIDE, Pool
from scheduler.protocol.admission import TierLimit, Verdict
from scheduler.protocol.pool_view import Observation, WorkerView
from scheduler.states import Admission

HOUR_US = 3_600_000_000


async def ask(pool: Pool, count: int, rate: float, burst: float) -> list[Verdict]:
    """`count` requests of one key with this limit."""
    return await pool.admit([pool.submission(rate=rate, burst=burst) for _ in range(count)])


def accepted(verdicts: list[Verdict]) -> int:
    return sum(verdict.outcome is Admission.ACCEPTED for verdict in verdicts)


@pytest.mark.parametrize("offset_us", [HOUR_US, -HOUR_US], ids=["from the future", "from the past"])
async def test_bug_16_clock_skew_in_ages(pool: Pool, offset_us: int) -> None:
    """A clock that jumps makes ages negative or endless; here time is Redis TIME alone, and a difference is clamped."""
    await ask(pool, 1, 0.001, 10)
    now_s, micro = await pool.client.time()
    stamp = now_s * 1_000_000 + micro + offset_us
    await pool.client.hset("rl:customer:customer", mapping={"tokens": "5.000000", "at": str(stamp)})
    (request_id,) = await pool.queue(1, customer_id="other")
    await pool.timed(request_id, at=now_s * 1000 + 3_600_000)

    verdicts = await ask(pool, 20, 0.001, 10)
    queues = await pool.batches.look(TIERS)

    assert accepted(verdicts) == (5 if offset_us > 0 else 8)  # An hour at 0.001 a second is 3.6 more.
    assert all(0 <= verdict.left.buckets[0].left <= 10 for verdict in verdicts)
    assert all(tier.oldest_ms >= 0 for tier in queues.tiers)


async def test_bug_20_a_bucket_that_drifts_and_is_reset_by_a_new_rate(pool: Pool) -> None:
    """Every change of a rate handed out a fresh burst; here tokens stay, and no more pass than burst and rate allow."""
    await ask(pool, 1, 0.0, 100)
    await pool.client.hset("rl:customer:customer", "tokens", "100.000000")
    random.seed(20)
    passed, most_rate, began = 0, 0.0, time.monotonic()
    for _ in range(60):
        rate, burst = random.choice([1.0, 5.0, 10.0]), random.choice([60.0, 100.0, 1000.0])
        most_rate = max(most_rate, rate)
        passed += accepted(await ask(pool, 5, rate, burst))

    elapsed_s = time.monotonic() - began
    assert passed <= 100 + most_rate * (elapsed_s + 0.01)
    assert passed >= 60


async def test_bug_20_a_smaller_burst_clamps(pool: Pool) -> None:
    """What was saved under a large burst cannot be spent under a small one."""
    await ask(pool, 1, 0.0, 100)
    await pool.client.hset("rl:customer:customer", "tokens", "100.000000")

    assert accepted(await ask(pool, 20, 0.0, 3)) == 3


async def test_bug_21_a_flush_gives_everybody_a_full_burst(pool: Pool) -> None:
    """After FLUSHALL every customer had a full burst at once; here a bucket that is not known begins a quarter full."""
    await ask(pool, 1, 0.001, 100)
    await pool.client.flushall()

    verdicts = await ask(pool, 100, 0.001, 100)

    assert accepted(verdicts) == 25
    assert await leaked_keys(pool.client) == []


async def test_bug_21_that_holds_for_a_tier_too(pool: Pool) -> None:
    """The bucket that all keys of a tier share is no back door."""
    await pool.client.flushall()
    limits = [TierLimit("free", 0.001, 40, 1000, TIERS) if tier.name == "free" else tier for tier in WIDE]

    verdicts = await pool.admit([pool.submission(api_key_id=f"key-{i}") for i in range(40)], limits)

    assert accepted(verdicts) == 10


async def test_bug_22_a_count_of_gpus_that_nobody_keeps(pool: Pool) -> None:
    """A counter of healthy GPUs outlived those who kept it; here it ages out, and is counted from heartbeats each time."""
    await pool.worker_beats("w1")
    await pool.worker_beats("w2")
    assert await pool.presence.census() == (2, 2)
    assert 0 < await pool.client.pttl(pool.keys.healthy_gpu_count) <= 3000
    await pool.client.set(pool.keys.healthy_gpu_count, 99, px=60_000)
    await pool.client.zadd(pool.keys.gpus, {"w1": 1})  # Silent since long ago.

    assert await pool.presence.census() == (1, 1)
    assert (await pool.batches.look(TIERS)).healthy_gpus == 1


def test_bug_22_a_gateway_derives_the_count_itself() -> None:
    """It holds what it last saw for ten seconds, then counts on one GPU: never on a number that grew old."""
    tier = Tier("free", 3, 0.1, (10.0, 20.0, 8, None), 500, 2000, None, None)
    model = Model("tiny", "default", 32, None, 40, 3000, 100.0, 0.8, 0, True)
    snapshot = Snapshot(1, (tier,), {}, {}, {"tiny": model}, ())
    workers = [WorkerView(name, "ready", 0.5, 1, 10.0, True, 100.0, 50.0, "simulated", "v1") for name in "abcd"]
    limits = LiveLimits("default")
    limits.observe(Observation(0, {}, workers, [], 0, 0, 0, 0), snapshot, 0.0)

    limits.lapse(snapshot, HOLD_S - 0.1)
    assert limits.capacity_rps == pytest.approx(320.0)
    limits.lapse(snapshot, HOLD_S + 0.1)
    assert limits.capacity_rps == pytest.approx(80.0)
    assert not limits.no_gpu(HOLD_S + WAITING_ROOM_S)
