"""Heartbeats, the census, and one look at everything."""

import msgspec
import pytest

from eventually import eventually
from pool import TIERS, Pool
from scheduler.protocol.pool_view import GatewayStats, TierStats
from scheduler.protocol.presence import COUNT_VALID_S, Presence
from scheduler.redis_client.keys import Keys


async def test_workers_that_beat_and_are_well_count(pool: Pool) -> None:
    """Only ready and busy workers count; the hash shows what the contract names."""
    for worker, status in (("w1", "ready"), ("w2", "busy"), ("w3", "starting"), ("w4", "down"), ("w5", "draining")):
        await pool.worker_beats(worker, status)

    assert await pool.presence.census() == (2, 5)

    assert await pool.client.get(pool.keys.healthy_gpu_count) == b"2"
    row = await pool.client.hgetall(pool.keys.gpu("w1"))
    assert {b"status", b"utilization", b"in_flight", b"last_heartbeat"} <= row.keys()


async def test_a_silent_worker_stops_counting_and_is_still_shown(pool: Pool) -> None:
    """Health must be able to say which worker was lost."""
    quick = Pool(pool.client, pool.keys, gone_ms=50)
    await quick.worker_beats("w1")

    await eventually(lambda: _is_lost(quick), "the silent worker is gone")

    seen = await quick.presence.observe(TIERS)
    assert [(w.id, w.healthy, w.status) for w in seen.workers] == [("w1", False, "ready")]
    assert (seen.healthy_gpus, seen.total_gpus) == (0, 1)


async def _is_lost(pool: Pool) -> bool:
    return await pool.presence.census() == (0, 1)


async def test_a_worker_that_leaves_is_forgotten(pool: Pool) -> None:
    """A graceful stop is no loss."""
    await pool.worker_beats("w1")
    await pool.presence.worker_gone("w1")

    assert await pool.presence.census() == (0, 0)
    assert await pool.client.exists(pool.keys.gpu("w1")) == 0


async def test_the_count_ages_out_when_nobody_counts(pool: Pool) -> None:
    """A stale count must not stand for ever."""
    await pool.presence.census()

    assert 0 < await pool.client.pttl(pool.keys.healthy_gpu_count) <= 3000


async def test_a_redis_that_comes_back_empty_does_not_count_nobody(pool: Pool) -> None:
    """The last count stands until all who live must have beaten: else nothing is formed meanwhile, and free is shed."""
    now_s = 100.0
    presence = Presence(pool.client, pool.keys, clock_s=lambda: now_s)
    for worker in ("w1", "w2"):
        await pool.worker_beats(worker)
    await presence.census()

    await pool.client.flushall()
    assert await presence.census() == (2, 0)
    await pool.worker_beats("w1")
    now_s += 0.5
    assert await presence.census() == (2, 1)
    assert await pool.client.get(pool.keys.healthy_gpu_count) == b"2"

    now_s += 0.6
    await presence.census()
    assert await presence.census() == (1, 1), "a worker that never came back was lost"


async def test_an_old_count_is_not_believed_of_an_empty_redis(pool: Pool) -> None:
    """Who was away for longer knows nothing of the workers."""
    now_s = 100.0
    presence = Presence(pool.client, pool.keys, clock_s=lambda: now_s)
    await pool.worker_beats("w1")
    await presence.census()

    await pool.client.flushall()
    now_s += COUNT_VALID_S + 1

    assert await presence.census() == (0, 0)


async def test_a_gateway_learns_that_redis_came_back_empty(pool: Pool) -> None:
    """The epoch stands while this Redis lives, is the same for all gateways, and is another one after a loss."""
    first = (await pool.gateway_lives("g2")).epoch_us

    assert {(await pool.gateway_lives(g)).epoch_us for g in ("g1", "g2", "g3")} == {first}

    await pool.client.flushall()
    assert (await pool.gateway_lives("g2")).epoch_us > first


async def test_an_admission_begins_the_same_epoch(pool: Pool) -> None:
    """Whoever comes first writes it, and nobody writes it again."""
    await pool.client.flushall()
    await pool.queue(1)
    written = int(await pool.client.get(pool.keys.epoch))

    assert (await pool.gateway_lives("g2")).epoch_us == written

    await pool.queue(1)
    assert int(await pool.client.get(pool.keys.epoch)) == written


async def test_a_gateway_learns_how_full_redis_is(pool: Pool) -> None:
    """The share of its memory limit that is in use; none is known where there is no limit."""
    used = (await pool.client.info("memory"))["used_memory"]
    try:
        await pool.client.config_set("maxmemory", 0)
        assert (await pool.gateway_lives("g1")).memory_share == 0.0
        await pool.client.config_set("maxmemory", used * 2)
        assert (await pool.gateway_lives("g1")).memory_share == pytest.approx(0.5, abs=0.2)
    finally:
        await pool.client.config_set("maxmemory", 0)


async def test_a_gateway_learns_of_another_eviction_policy(pool: Pool) -> None:
    """With its next beat, though roles look at it when they start alone."""
    try:
        assert (await pool.gateway_lives("g1")).policy == "noeviction"
        await pool.client.config_set("maxmemory-policy", "allkeys-lru")
        assert (await pool.gateway_lives("g1")).policy == "allkeys-lru"
    finally:
        await pool.client.config_set("maxmemory-policy", "noeviction")


async def test_observe_shows_everything_in_one_look(pool: Pool) -> None:
    """Queues, workers, gateways, outbox and dead letters, as of one moment."""
    stats = GatewayStats("g1", 12.5, {"free": TierStats(10.0, 1.0, 80.0)})
    await pool.presence.gateway_beat(stats)
    await pool.worker_beats("w1")
    await pool.queue(3)
    await pool.form([("free", 1)])

    seen = await pool.presence.observe(TIERS)

    assert {name: tier.depth for name, tier in seen.tiers.items()} == {"enterprise": 0, "paid": 0, "free": 2}
    assert seen.gateways == [stats]
    assert [(w.id, w.rps, w.backend) for w in seen.workers] == [("w1", 100.0, "simulated")]
    assert (seen.ready_batches, seen.leased_batches, seen.outbox, seen.dlq) == (1, 1, 1, 0)


async def test_observe_tells_how_long_schedulers_and_gateways_are_silent(pool: Pool) -> None:
    """By Redis' own clock; a scheduler that never passed, or not for a minute, is not known."""
    assert (await pool.presence.observe(TIERS)).scheduler_age_ms is None
    await pool.terminations.reap(0)
    now_ms = await pool.now_ms()
    await pool.client.zadd(pool.keys.gateways, {"g1": now_ms - 1500})
    await pool.client.set(pool.keys.scheduled_at, now_ms - 2500, px=1000)

    seen = await pool.presence.observe(TIERS)

    assert seen.scheduler_age_ms is not None
    assert 2500 <= seen.scheduler_age_ms < 12_500
    assert seen.gateway_ages_ms.keys() == {"g1"}
    assert 1500 <= seen.gateway_ages_ms["g1"] < 11_500


async def test_who_stands_in_for_schedulers_is_none(pool: Pool) -> None:
    """Its passes keep up what the reaper knows of standstills; the age of schedulers goes on growing, or is unknown."""
    await pool.terminations.reap(0, standing_in=True)
    seen = await pool.presence.observe(TIERS)
    assert seen.scheduler_age_ms is None
    assert seen.pass_age_ms is not None
    assert seen.pass_age_ms < 10_000

    await pool.terminations.reap(0)
    await pool.client.decrby(pool.keys.scheduled_at, 60_000)
    await pool.client.decrby(pool.keys.reaped_at, 60_000)
    await pool.client.pexpire(pool.keys.scheduled_at, 5000)
    await pool.terminations.reap(0, standing_in=True)

    seen = await pool.presence.observe(TIERS)
    assert seen.scheduler_age_ms is not None
    assert seen.pass_age_ms is not None
    assert seen.pass_age_ms < 10_000
    assert seen.scheduler_age_ms >= 60_000
    assert await pool.client.pttl(pool.keys.scheduled_at) > 50_000


async def test_the_pass_of_an_older_scheduler_counts(pool: Pool) -> None:
    """It writes the reaper's key alone."""
    await pool.client.set(pool.keys.reaped_at, await pool.now_ms() - 300, px=60_000)

    seen = await pool.presence.observe(TIERS)

    assert seen.scheduler_age_ms == seen.pass_age_ms
    assert seen.pass_age_ms is not None
    assert 300 <= seen.pass_age_ms < 10_300


async def test_a_heartbeat_that_cannot_be_read_spoils_nothing(pool: Pool) -> None:
    """One bad worker is shown as unknown; the others stay visible."""
    await pool.worker_beats("good")
    await pool.worker_beats("bad")
    await pool.client.hset(pool.keys.gpu("bad"), "beat", msgspec.msgpack.encode({"not": "a beat"}))

    seen = await pool.presence.observe(TIERS)

    assert {w.id: (w.status, w.healthy) for w in seen.workers} == {"good": ("ready", True), "bad": ("unknown", False)}


async def test_pools_do_not_see_each_other(pool: Pool) -> None:
    """Every key of a pool carries its prefix, but the limits of a customer, which hold in all of them."""
    other = Pool(pool.client, Keys("embeddings"))
    await other.gateway_lives("g1")
    await other.worker_beats("w9")
    await other.queue(2)
    await other.running(1)

    assert (await pool.presence.observe(TIERS)).workers == []
    assert await pool.depth("free") == 0
    keys = [k.decode() async for k in pool.client.scan_iter()]
    assert {k for k in keys if not k.startswith("{embeddings}:")} == {
        "protocol",
        "gateway:g1",
        "gateways",
        "epoch",
        "epoch_run",
        "rl:customer:customer",
        "rl:leases:customer",
    }


async def test_what_a_scheduler_says_of_itself_is_seen_by_all(pool: Pool) -> None:
    """With its next pass; it is forgotten a few seconds after it was said last."""
    assert (await pool.presence.observe(TIERS)).notices == []
    await pool.presence.census(["scheduler s-1: the task 'dispatcher' returned"])

    assert (await pool.presence.observe(TIERS)).notices == ["scheduler s-1: the task 'dispatcher' returned"]
    assert 0 < await pool.client.pttl(pool.keys.notices) <= 5000
    await pool.presence.census()
    assert len((await pool.presence.observe(TIERS)).notices) == 1

    await pool.client.zadd(pool.keys.notices, {"scheduler s-1: the task 'dispatcher' returned": 1})  # Long ago.
    assert (await pool.presence.observe(TIERS)).notices == []
