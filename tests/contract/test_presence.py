"""Heartbeats, census, cordons, observations, and the version of the stored data."""

from collections.abc import Sequence
from functools import cache

import msgspec
import pytest
from redis.asyncio import Redis

from configs import GONE_MS
from eventually import eventually
from pool import TIERS, Pool
from scheduler.protocol.cordons import REWRITE_S, Cordons, CordonSync
from scheduler.protocol.pool_view import GatewayStats, TierStats, WorkerReport
from scheduler.protocol.presence import COUNT_VALID_S, MOVES_KEEP_MS, Presence
from scheduler.protocol.worker_heartbeat import COMPLETE_EVERY_S, AsyncHeartbeat, CordonStatus, WorkerBeatReply
from scheduler.redis_client.connections import pipelined


@cache
def report(worker: str = "w1", status: str = "ready") -> WorkerReport:
    """The same object for the same values: an unchanged report is recognised by identity."""
    return WorkerReport(worker, status, 0.5, 1, 100.0, 50.0, "simulated", "v1")


async def test_the_census_counts_healthy_workers(pool: Pool) -> None:
    """Ready and busy ones; the count expires if no scheduler renews it."""
    for worker, status in (("w1", "ready"), ("w2", "busy"), ("w3", "starting"), ("w4", "down"), ("w5", "cordoned")):
        await pool.worker_beats(worker, status)

    assert await pool.presence.census() == (2, 5)

    assert await pool.client.get(pool.keys.healthy_gpu_count) == b"2"
    assert 0 < await pool.client.pttl(pool.keys.healthy_gpu_count) <= 3000
    row = await pool.client.hgetall(pool.keys.gpu("w1"))
    assert {b"status", b"utilization", b"in_flight", b"last_heartbeat"} <= row.keys()


async def test_a_worker_counts_from_its_first_heartbeat(pool: Pool) -> None:
    """And not any more once it reports that it is draining: batches are formed for those that are there, not for the last census."""
    await pool.worker_beats("w1")
    await pool.presence.census()
    counts = []

    for worker, status in (("w2", "ready"), ("w3", "starting"), ("w2", "busy"), ("w3", "ready"), ("w1", "draining")):
        await pool.worker_beats(worker, status)
        counts.append(int(await pool.client.get(pool.keys.healthy_gpu_count)))

    assert counts == [2, 2, 2, 3, 2]
    assert await pool.presence.census() == (2, 3)
    assert 0 < await pool.client.pttl(pool.keys.healthy_gpu_count) <= 3000


async def test_a_silent_worker_is_lost_and_a_stopped_one_is_removed(pool: Pool) -> None:
    """Health reports lost workers."""
    quick = Pool(pool.client, pool.keys, gone_ms=50)
    await quick.worker_beats("w1")
    await quick.worker_beats("w2")
    await quick.presence.worker_gone("w2")

    async def is_lost() -> bool:
        return await quick.presence.census() == (0, 1)

    await eventually(is_lost, "the silent worker is lost")

    view = await quick.presence.observe(TIERS)
    assert [(w.id, w.healthy, w.status) for w in view.workers] == [("w1", False, "ready")]
    assert (view.healthy_gpus, view.total_gpus) == (0, 1)
    assert await pool.client.exists(pool.keys.gpu("w2")) == 0


async def test_heartbeats_of_other_versions_are_read(pool: Pool) -> None:
    """Fields that an older worker does not report have their defaults; those that only a newer one reports are skipped."""
    own = msgspec.structs.replace(report(), host="node-1", pid=4711)
    fields = msgspec.msgpack.decode(msgspec.msgpack.encode(own))
    for worker, sent in (("old", fields[:8]), ("own", fields), ("new", [*fields, "more"])):
        await pool.worker_beats(worker)
        packed = msgspec.msgpack.encode([worker, *sent[1:]])
        await pool.client.hset(pool.keys.gpu(worker), "beat", packed)  # type: ignore[misc]

    view = await pool.presence.observe(TIERS)

    assert {each.id: (each.model_version, each.host, each.pid) for each in view.workers} == {
        "old": ("v1", "", 0),
        "own": ("v1", "node-1", 4711),
        "new": ("v1", "node-1", 4711),
    }


async def test_after_a_loss_of_redis_the_last_count_is_valid_for_a_second(pool: Pool) -> None:
    """Until all workers have sent a heartbeat; otherwise no batch would be formed, and requests would be shed."""
    now_s = 100.0
    presence = Presence(pool.client, pool.keys, gone_ms=GONE_MS, clock_s=lambda: now_s)
    for worker in ("w1", "w2"):
        await pool.worker_beats(worker)
    await presence.census()

    await pool.client.flushall()
    assert await presence.census() == (2, 0)
    await pool.worker_beats("w1")
    assert await pool.client.get(pool.keys.healthy_gpu_count) == b"2"  # that it is back adds none to the last count
    now_s += 0.5
    assert await presence.census() == (2, 1)
    assert await pool.client.get(pool.keys.healthy_gpu_count) == b"2"

    now_s += 0.6
    await presence.census()
    assert await presence.census() == (1, 1)

    await pool.client.flushall()
    now_s += COUNT_VALID_S + 1
    assert await presence.census() == (0, 0)  # the last count is too old


async def test_the_epoch_changes_when_redis_loses_its_data(pool: Pool) -> None:
    """It is the same for all gateways, whether a heartbeat or an admission begins it."""
    first = (await pool.gateway_lives("g2")).epoch_us
    assert {(await pool.gateway_lives(g)).epoch_us for g in ("g1", "g2", "g3")} == {first}

    await pool.client.flushall()
    for _ in range(2):
        await pool.queue(1)
        second = int(await pool.client.get(pool.keys.epoch))
        assert (await pool.gateway_lives("g2")).epoch_us == second > first
        assert (await pool.presence.observe(TIERS)).epoch_us == second


async def test_a_gateway_heartbeat_returns_memory_and_eviction_policy(pool: Pool) -> None:
    """The used share of the memory limit; 0 without a limit."""
    used = (await pool.client.info("memory"))["used_memory"]
    try:
        await pool.client.config_set("maxmemory", 0)
        reply = await pool.gateway_lives("g1")
        assert (reply.memory_share, reply.policy) == (0.0, "noeviction")
        await pool.client.config_set("maxmemory", used * 2)
        await pool.client.config_set("maxmemory-policy", "allkeys-lru")
        reply = await pool.gateway_lives("g1")
        assert reply.memory_share == pytest.approx(0.5, abs=0.2)
        assert reply.policy == "allkeys-lru"
    finally:
        await pool.client.config_set("maxmemory", 0)
        await pool.client.config_set("maxmemory-policy", "noeviction")


# Observation


async def test_an_observation_has_the_whole_pool(pool: Pool) -> None:
    """Queues, workers, gateways, outbox and dead letters; a heartbeat that cannot be read is an unknown worker."""
    stats = GatewayStats("g1", 12.5, {"free": TierStats(10.0, 1.0, 80.0)})
    await pool.presence.gateway_beat(stats)
    await pool.worker_beats("w1")
    await pool.worker_beats("w2")
    await pool.client.hset(pool.keys.gpu("w2"), "beat", msgspec.msgpack.encode({"not": "a beat"}))
    for request_id in await pool.queue(3):  # accepted before Redis TIME went back
        await pool.timed(request_id, at=await pool.now_ms() + 3_600_000)
    await pool.form([("free", 1)])

    view = await pool.presence.observe(TIERS)

    assert {name: tier.depth for name, tier in view.tiers.items()} == {"enterprise": 0, "paid": 0, "free": 2}
    assert view.gateways == [stats]
    assert [(w.id, w.rps, w.backend) for w in view.workers][:1] == [("w1", 100.0, "simulated")]
    assert [(w.status, w.healthy) for w in view.workers] == [("ready", True), ("unknown", False)]
    assert (view.ready_batches, view.leased_batches, view.outbox, view.dlq) == (1, 1, 1, 0)
    assert all(tier.oldest_ms >= 0 for tier in view.tiers.values())


@pytest.mark.parametrize(
    ("scheduled_ms", "passed_ms", "standing_in", "scheduler_age", "pass_age"),
    [
        (None, None, None, None, None),
        (None, 300, None, 300, 300),  # an older scheduler writes only the time of the pass
        (None, None, True, None, 0),  # a gateway in place of schedulers
        (None, None, False, 0, 0),
        (60_000, 60_000, True, 60_000, 0),
        (-60_000, None, True, None, 0),  # TIME was set back
    ],
)
async def test_the_age_of_the_last_scheduler_pass(
    pool: Pool,
    scheduled_ms: int | None,
    passed_ms: int | None,
    standing_in: bool | None,
    scheduler_age: int | None,
    pass_age: int | None,
) -> None:
    """By Redis TIME. A pass of a gateway in place of schedulers counts as a pass, but not as a scheduler."""
    now_ms = await pool.now_ms()
    for key, age_ms in ((pool.keys.scheduled_at, scheduled_ms), (pool.keys.reaped_at, passed_ms)):
        if age_ms is not None:
            await pool.client.set(key, now_ms - age_ms, px=5000)
    if standing_in is not None:
        await pool.terminations.reap(0, standing_in=standing_in)
        assert await pool.client.pttl(pool.keys.scheduled_at) > 50_000
    await pool.client.zadd(pool.keys.gateways, {"g1": now_ms - 1500})

    view = await pool.presence.observe(TIERS)

    for found, expected in ((view.scheduler_age_ms, scheduler_age), (view.pass_age_ms, pass_age)):
        assert found is None if expected is None else found is not None and expected <= found < expected + 10_000
    assert view.gateway_ages_ms.keys() == {"g1"}
    assert 1500 <= view.gateway_ages_ms["g1"] < 11_500


async def test_notices_of_schedulers_expire(pool: Pool) -> None:
    """A scheduler reports its own problems with the census; they are observed for some seconds."""
    notice = "scheduler s-1: the task 'dispatcher' returned"
    await pool.presence.census([notice])

    assert (await pool.presence.observe(TIERS)).notices == [notice]
    assert 0 < await pool.client.pttl(pool.keys.notices) <= 5000
    await pool.presence.census()
    assert (await pool.presence.observe(TIERS)).notices == [notice]

    await pool.client.zadd(pool.keys.notices, {notice: 1})
    assert (await pool.presence.observe(TIERS)).notices == []


# Heartbeats without a pending call


class Failures:
    """Counts the heartbeats that failed."""

    count = 0

    def __call__(self) -> None:
        self.count += 1


@pytest.fixture
def failures() -> Failures:
    return Failures()


@pytest.fixture
async def heartbeat(pool: Pool, failures: Failures) -> AsyncHeartbeat:
    """Of a registered worker with a connection."""
    await pool.presence.worker_beat(report())
    return pool.presence.async_heartbeat(failures)


async def send(heartbeat: AsyncHeartbeat, status: str = "ready") -> None:
    """Send one and wait for its reply."""
    assert heartbeat.send(report(status=status))
    await eventually(lambda: not heartbeat.pending, "the reply")


async def test_an_unchanged_heartbeat_updates_only_its_time(
    pool: Pool, heartbeat: AsyncHeartbeat, failures: Failures
) -> None:
    """In the row and in the index; a changed one is sent completely."""
    await send(heartbeat)
    await pool.client.hset(pool.keys.gpu("w1"), "last_heartbeat", 1)
    before = await pool.client.hgetall(pool.keys.gpu("w1"))

    await send(heartbeat)

    after = await pool.client.hgetall(pool.keys.gpu("w1"))
    time = int(after.pop(b"last_heartbeat"))
    assert time > int(before.pop(b"last_heartbeat"))
    assert after == before
    assert await pool.client.zscore(pool.keys.gpus, "w1") == time
    await send(heartbeat, "draining")
    assert await pool.client.hget(pool.keys.gpu("w1"), "status") == b"draining"
    assert failures.count == 0


@pytest.mark.usefixtures("heartbeat")  # It registers the worker.
async def test_a_complete_heartbeat_is_sent_regularly(pool: Pool, failures: Failures) -> None:
    """So that the row of a running worker never expires."""
    now = [1000.0]
    heartbeat = AsyncHeartbeat(pool.client, pool.keys, failures, lambda: now[0])
    await send(heartbeat)
    await pool.client.pexpire(pool.keys.gpu("w1"), 60_000)
    now[0] += COMPLETE_EVERY_S - 0.1
    await send(heartbeat)
    assert await pool.client.pttl(pool.keys.gpu("w1")) <= 60_000

    now[0] += 0.2
    await send(heartbeat)

    assert await pool.client.pttl(pool.keys.gpu("w1")) > 300_000


async def test_after_a_loss_of_redis_a_complete_heartbeat_is_required(
    pool: Pool, heartbeat: AsyncHeartbeat, failures: Failures
) -> None:
    """A partial row would be no worker, and would never expire."""
    await send(heartbeat)
    await pool.client.delete(pool.keys.gpu("w1"), pool.keys.gpus)

    await send(heartbeat)

    assert failures.count == 1
    assert await pool.client.exists(pool.keys.gpu("w1"), pool.keys.gpus) == 0
    heartbeat.forget()
    await send(heartbeat)
    assert await pool.presence.census() == (1, 1)


async def test_a_late_heartbeat_does_not_restore_a_stopped_worker(pool: Pool, heartbeat: AsyncHeartbeat) -> None:
    """It may arrive after the worker was removed."""
    await send(heartbeat)
    await pool.presence.worker_gone("w1")

    await send(heartbeat)

    assert await pool.presence.census() == (0, 0)


async def test_a_missing_script_is_a_failure(pool: Pool, heartbeat: AsyncHeartbeat, failures: Failures) -> None:
    """The next complete heartbeat sends the script."""
    await pool.client.script_flush()
    await send(heartbeat)
    assert failures.count == 1

    await pool.presence.worker_beat(report())
    await send(heartbeat)

    assert failures.count == 1


@pytest.mark.parametrize("is_closed", [True, False])
async def test_one_heartbeat_at_a_time(
    client: Redis, heartbeat: AsyncHeartbeat, failures: Failures, *, is_closed: bool
) -> None:
    """A lost connection is a failure; a heartbeat that is given up is not. Neither connection is used again."""
    assert heartbeat.send(report())
    assert not heartbeat.send(report())

    if is_closed:
        pipelined(client).close()
    else:
        heartbeat.give_up()

    assert (failures.count, heartbeat.pending) == (int(is_closed), False)
    assert not heartbeat.send(report())


# Cordons


async def test_the_reply_to_a_heartbeat_has_the_cordon(pool: Pool) -> None:
    """Of complete and of partial heartbeats. After a loss of Redis it is unknown until the list is written again."""
    cordons, received = Cordons(pool.client, pool.keys), []
    await pool.presence.worker_beat(report())
    heartbeat = pool.presence.async_heartbeat(lambda: None, received.append)

    for named, changed, status in (
        (["w1", "w3"], 2, CordonStatus.CORDONED),
        (["w2", "w3"], 2, CordonStatus.FREE),
        (["w2", "w3"], 0, CordonStatus.FREE),
    ):
        assert await cordons.write(named) == changed
        assert await pool.presence.worker_beat(report()) == (status, None, 0.0)
        await send(heartbeat)
        assert received.pop() == (status, None, 0.0)

    await pool.client.flushall()
    assert (await pool.presence.worker_beat(report())).cordon is CordonStatus.UNKNOWN
    await cordons.write([])
    assert (await pool.presence.worker_beat(report())).cordon is CordonStatus.FREE


async def test_the_reply_to_a_heartbeat_has_the_moves(pool: Pool, heartbeat: AsyncHeartbeat) -> None:
    """While schedulers publish them, in replies to complete and to partial heartbeats. They expire soon after the last one."""
    received: list[WorkerBeatReply] = []
    heartbeat = pool.presence.async_heartbeat(lambda: None, received.append)
    await pool.presence.publish_moves(b"any bytes \x00\xff")
    assert 0 < await pool.client.pttl(pool.keys.moves) <= MOVES_KEEP_MS

    for _ in range(2):
        await send(heartbeat)
    whole = await pool.presence.worker_beat(report())
    await pool.client.delete(pool.keys.moves)

    assert {each.moves for each in (whole, *received)} == {b"any bytes \x00\xff"}
    assert {each.cordon for each in (whole, *received)} == {CordonStatus.UNKNOWN}
    assert (await pool.presence.worker_beat(report())).moves is None


async def test_the_reply_to_a_heartbeat_has_the_objective_of_the_pool(pool: Pool, heartbeat: AsyncHeartbeat) -> None:
    """With and without moves; it is gone with the next list of cordons that has none."""
    cordons, received = Cordons(pool.client, pool.keys), []
    heartbeat = pool.presence.async_heartbeat(lambda: None, received.append)
    await cordons.write(["w1"], 12.5)
    await pool.presence.worker_beat(report())
    await send(heartbeat)
    await pool.presence.publish_moves(b"any bytes")

    assert received == [(CordonStatus.CORDONED, None, 12.5)]
    assert await pool.presence.worker_beat(report()) == (CordonStatus.CORDONED, b"any bytes", 12.5)
    await cordons.write(["w1"])
    assert await pool.presence.worker_beat(report()) == (CordonStatus.CORDONED, b"any bytes", 0.0)


class RecordedCordons(Cordons):
    """Records the lists that are written."""

    def __init__(self) -> None:
        self.written: list[list[str]] = []

    async def write(self, workers: Sequence[str], tpot_ms: float = 0.0) -> int:
        self.written.append(sorted(workers))
        return 0


async def test_cordons_are_written_on_changes_and_each_second() -> None:
    """A scheduler that does not know the list (no PostgreSQL) writes nothing."""
    cordons, now, wanted = RecordedCordons(), [0.0], [frozenset({"w1"})]
    sync = CordonSync(cordons, lambda: wanted[0], lambda: now[0])
    table: list[tuple[float, frozenset[str] | None, list[list[str]]]] = [
        (0.0, frozenset({"w1"}), [["w1"]]),
        (REWRITE_S / 2, frozenset({"w1"}), []),
        (REWRITE_S / 2, frozenset({"w1", "w2"}), [["w1", "w2"]]),
        (REWRITE_S, frozenset({"w1", "w2"}), []),
        (REWRITE_S * 1.5, frozenset({"w1", "w2"}), [["w1", "w2"]]),
        (REWRITE_S * 9, None, []),
        (REWRITE_S * 9, frozenset(), [[]]),
    ]

    for at, known, expected in table:
        cordons.written.clear()
        now[0], wanted[0] = at, known
        await sync.sync()
        assert cordons.written == expected, at
