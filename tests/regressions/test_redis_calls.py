"""Bugs of calls to Redis: reads that never return, commands that run twice, replies for another caller."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest
from redis.asyncio import Redis

from configs import BACKGROUND_SHARE, GONE_MS, LEASE_MS, PASS_MS, REPLAYS
from eventually import eventually
from gateway.http.error_responses import JITTER, ErrorResponses
from gateway.inference.pending import PendingRequests
from gateway.inference.responses import ResponseSubscriber
from pool import TIERS, WIDE, Pool, done
from regressions.bad_line import BadLine
from scheduler.batching.dispatcher import Dispatcher, Waker
from scheduler.batching.reaper import Reaper
from scheduler.batching.tier_policy import BatchPolicy, TierPolicy
from scheduler.errors import ErrorCode, RedisUnavailable, RequestError, StartError
from scheduler.protocol.admission import Admissions
from scheduler.protocol.batches import Batches
from scheduler.protocol.cancellation import Reaped, Terminations
from scheduler.protocol.presence import Presence
from scheduler.protocol.ready_batches import ReadyBatches
from scheduler.protocol.replies import Results
from scheduler.redis_client.backoff import Backoff
from scheduler.redis_client.connections import (
    blocking_client,
    bounded,
    check_server,
    command_client,
    pipelined,
    subscriber_client,
)
from scheduler.redis_client.keys import Keys
from scheduler.states import Admission
from scheduler.tasks import end_all

KEYS = Keys()


@pytest.fixture
async def commands(line: BadLine) -> AsyncIterator[Redis]:
    """A command client behind the proxy."""
    client = command_client(line.url)
    yield client
    await client.aclose()


@pytest.fixture
async def blocking(line: BadLine) -> AsyncIterator[Redis]:
    """A client for blocking reads behind the proxy."""
    client = blocking_client(line.url)
    yield client
    await client.aclose()


async def ready_batch(pool: Pool) -> None:
    """Form batch `b1` of one request."""
    await pool.queue(1)
    await pool.form([("free", 1)])


async def test_bug_05_an_item_is_lost_with_its_consumer(pool: Pool) -> None:
    """BLPOP loses the item of a consumer that crashes. Here the item is an id, whose batch is pushed again without an attempt."""
    await ready_batch(pool)
    assert await pool.pop() == "b1"
    await pool.expire_leases()

    assert await pool.terminations.reap(0) == Reaped(0, 1, 0, 0)

    assert [member.attempt for member in (await pool.claim_next("w2")).requests] == [1]


async def test_bug_05_a_client_timeout_shorter_than_the_block(pool: Pool, line: BadLine, blocking: Redis) -> None:
    """Such a timeout drops items in flight. Here an empty read returns None on the same connection."""
    ready = ReadyBatches(blocking, KEYS, block_s=0.6)

    assert await ready.pop() is None

    await ready_batch(pool)
    assert await ready.pop() == "b1"
    assert line.accepted == 1


async def test_bug_06_a_blocking_read_that_never_returns(pool: Pool, line: BadLine, blocking: Redis) -> None:
    """After a failover a blocking read can hang. Here it has a deadline, and the next one uses a new connection."""
    ready = ReadyBatches(blocking, KEYS, block_s=0.1)
    assert await ready.pop() is None
    line.drop_replies = True
    began = time.monotonic()
    with pytest.raises(RedisUnavailable):
        await ready.pop()
    assert time.monotonic() - began < 0.1 + 1.0 + 0.5
    line.drop_replies = False
    await ready_batch(pool)

    assert await eventually(ready.pop, "the next read works") == "b1"
    assert line.accepted == 2


async def test_bug_07_a_client_library_repeats_a_command(pool: Pool, line: BadLine, commands: Redis) -> None:
    """A client that retries pushes twice if a reply is lost. Here it does not retry, and repeated calls are idempotent."""
    await commands.ping()
    await pipelined(commands).call((b"PING",), 1.0)
    (first,) = await pool.queue(1, "enterprise")  # Redis has the script
    admissions, submission = Admissions(commands, KEYS, "g1", replays=REPLAYS, pass_ms=PASS_MS), pool.submission()
    line.drop_replies = True
    with pytest.raises(RedisUnavailable):
        await admissions.admit(WIDE, 0.0, [submission])
    with pytest.raises(RedisUnavailable):
        async with bounded():
            await commands.lpush("queue:paid", "once")
    line.drop_replies = False
    assert line.sent(b"LPUSH") == await pool.client.llen("queue:paid") == 1

    verdicts = await admissions.admit(WIDE, 0.0, [submission])

    assert [verdict.outcome for verdict in verdicts] == [Admission.DUPLICATE]
    assert await pool.depth("free") == 1
    assert [record.id for record in (await pool.audit())[0]] == [first, submission.id]


async def test_bug_18_thundering_herd(pool: Pool, redis_url: str) -> None:
    """One item wakes one of several readers, and retries of clients and of connections are spread."""
    clients = [blocking_client(redis_url) for _ in range(3)]
    readers = [asyncio.create_task(ReadyBatches(client, KEYS, block_s=5.0).pop()) for client in clients]

    async def all_blocked() -> bool:
        return int((await pool.client.info("clients"))["blocked_clients"]) >= 3

    await eventually(all_blocked, "three workers block")
    await ready_batch(pool)

    woken, asleep = await asyncio.wait(readers, return_when=asyncio.FIRST_COMPLETED)

    assert ([task.result() for task in woken], len(asleep)) == (["b1"], 2)
    assert await pool.client.llen(KEYS.wake) <= 1
    await end_all(list(asleep))
    for client in clients:
        await client.aclose()
    delays = {Backoff(1.0, 1.0).next_s() for _ in range(20)}
    assert len(delays) > 10
    assert min(delays) < 0.5 < max(delays)
    early, late = (
        int(dict(ErrorResponses(draw).answer(RequestError(ErrorCode.NO_CAPACITY), "r").headers)["retry-after-ms"])
        for draw in (lambda: 0.0, lambda: 1.0)
    )
    assert late == round(early * (1 + JITTER))


@pytest.mark.parametrize("verb", ["observe", "census", "reap"])
async def test_bug_19_layered_retries(pool: Pool, line: BadLine, commands: Redis, verb: str) -> None:
    """Retries of three layers multiply to 27 calls. Here only the caller retries: one call is sent once."""
    calls: dict[str, Callable[[], Coroutine[Any, Any, Any]]] = {
        "observe": lambda: Presence(commands, KEYS, gone_ms=GONE_MS).observe(TIERS),
        "census": Presence(commands, KEYS, gone_ms=GONE_MS).census,
        "reap": lambda: Terminations(commands, KEYS, lease_ms=LEASE_MS).reap(0),
    }
    await calls[verb]()
    sent = line.sent(b"EVALSHA")
    line.drop_replies = True

    with pytest.raises(RedisUnavailable):
        await calls[verb]()

    assert line.sent(b"EVALSHA") - sent == 1
    assert await pool.client.ping()


async def test_bug_30_a_cancelled_call_corrupts_its_connection(pool: Pool, line: BadLine, commands: Redis) -> None:
    """The reply to a cancelled call was returned to the next caller (CVE-2023-28858). Here each caller gets its own."""
    await pool.client.set("mine", "my secret", px=60_000)
    await pool.client.set("yours", "your secret", px=60_000)
    line.delay_s = 0.01
    for i in range(12):
        for get in (commands.get, lambda key: pipelined(commands).call((b"GET", key), 1.0)):
            mine = asyncio.ensure_future(get("mine"))
            await asyncio.wait([mine], timeout=i * 0.0015)
            mine.cancel()
            assert await get("yours") == b"your secret"
            await asyncio.gather(mine, return_exceptions=True)


async def test_bug_31_missing_scripts(pool: Pool) -> None:
    """NOSCRIPT after a restart or SCRIPT FLUSH. Here every call sends its script again."""
    (request_id,) = await pool.queue(1)
    for step in (
        lambda: pool.gateway_lives("g1"),
        lambda: pool.worker_beats("w1"),
        lambda: pool.presence.observe(TIERS),
        lambda: pool.batches.look(TIERS),
        lambda: pool.form([("free", 1)]),
        lambda: pool.batches.claim("b1", "w1", "token"),
        lambda: pool.batches.renew("b1", "token"),
        lambda: pool.batches.finish("b1", "token", [done(request_id)]),
        lambda: pool.terminations.reap(0),
        lambda: pool.terminations.expire(TIERS),
        lambda: pool.outbox.take(10),
        lambda: pool.queue(1),
    ):
        await pool.client.script_flush()
        await step()

    assert await pool.states([request_id]) == ["completed"]
    assert await pool.depth("free") == 1


async def test_bug_34_eviction(pool: Pool) -> None:
    """An eviction policy of a cache deletes the queue. Here a role does not start with such a server."""
    await check_server(pool.client)
    await pool.client.config_set("maxmemory-policy", "allkeys-lru")
    try:
        with pytest.raises(StartError, match="noeviction"):
            await check_server(pool.client)
    finally:
        await pool.client.config_set("maxmemory-policy", "noeviction")


POLICY = BatchPolicy(4, 10.0, 4, 1000.0, [TierPolicy(name, i, 0.1) for i, name in enumerate(TIERS)], BACKGROUND_SHARE)


async def test_bug_35_busy_loops_while_redis_is_unavailable(
    pool: Pool, line: BadLine, blocking: Redis, commands: Redis
) -> None:
    """Loops that spin or end while Redis is unavailable. Here each one slows down, and works again afterwards."""
    subscribing = subscriber_client(line.url)
    waker = Waker(blocking, KEYS, block_s=0.2)
    subscriber = ResponseSubscriber(subscribing, KEYS.responses("g1"), PendingRequests(), Results(commands, KEYS))
    reaper = Reaper(
        Terminations(commands, KEYS, lease_ms=LEASE_MS),
        Presence(commands, KEYS, gone_ms=GONE_MS),
        lambda: TIERS,
        lambda: 0,
        PASS_MS,
    )
    loops = [
        waker,
        subscriber,
        reaper,
        Dispatcher(Batches(commands, KEYS, lease_ms=LEASE_MS), waker, lambda: POLICY, time.monotonic),
    ]
    line.refuse = True
    tasks = [asyncio.create_task(loop.run()) for loop in loops]
    began = time.monotonic()
    await eventually(lambda: line.accepted >= 40, "forty attempts")
    assert time.monotonic() - began > 0.4  # a busy loop makes thousands in that time
    line.refuse = False

    await eventually(subscriber.subscribed.is_set, "the subscription")
    await pool.worker_beats("w1")
    await pool.queue(1)
    await eventually(pool.pop, "a batch is formed")
    assert not any(task.done() for task in tasks)
    await end_all(tasks)
    await subscribing.aclose()
