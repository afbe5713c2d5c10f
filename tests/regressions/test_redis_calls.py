"""Bugs at the line to Redis: reads that never return, commands that run twice, replies that reach somebody else."""

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from eventually import eventually
from gateway.http.errors import JITTER, ErrorResponses
from gateway.inference.pending import PendingRequests
from gateway.inference.responses import ResponseSubscriber
from pool import TIERS, WIDE, Pool, done
from regressions.bad_line import BadLine
from scheduler.batching.dispatcher import Dispatcher, Waker
from scheduler.batching.policy import BatchPolicy, TierPolicy
from scheduler.batching.reaper import Reaper
from scheduler.errors import ErrorCode, RedisUnavailable, RequestError, StartError
from scheduler.protocol.admission import Admissions
from scheduler.protocol.batches import Batches, ReadyBatches
from scheduler.protocol.cancellation import Terminations
from scheduler.protocol.presence import Presence
from scheduler.protocol.replies import Results
from scheduler.redis_client.connections import (
    blocking_client,
    bounded,
    check_server,
    command_client,
    pipelined,
    subscriber_client,
)
from scheduler.redis_client.keys import Keys
from scheduler.redis_client.pipeline import Backoff
from scheduler.states import Admission
from scheduler.tasks import end_all
from tierlane.embedded.redis import EmbeddedRedis

KEYS = Keys()


async def test_bug_05_a_popped_item_is_lost_with_its_consumer(pool: Pool) -> None:
    """BLPOP loses what a dying consumer popped; here that is an id, and its batch is pushed again, no attempt spent."""
    await pool.queue(2)
    await pool.form([("free", 2)])
    assert await pool.pop() == "b1"  # And the worker dies with it.

    await pool.expire_leases()
    await pool.terminations.reap(0)

    assert await pool.pop() == "b1"
    claimed = await pool.batches.claim("b1", "w2", "token")
    assert claimed is not None
    assert [member.attempt for member in claimed.requests] == [1, 1]


async def test_bug_05_a_client_timeout_shorter_than_the_block(pool: Pool, line: BadLine) -> None:
    """A socket timeout below the block drops items in flight; here an empty wait ends as None, on the same connection."""
    client = blocking_client(line.url)
    ready = ReadyBatches(client, KEYS, block_s=0.6)

    assert await ready.pop() is None

    await pool.queue(1)
    await pool.form([("free", 1)])
    assert await ready.pop() == "b1"
    assert line.accepted == 1
    await client.aclose()


async def test_bug_06_a_blocking_read_that_never_returns(pool: Pool, line: BadLine) -> None:
    """After a failover a blocked read can hang for ever; here a deadline of ours ends it, and the next one is on a new line."""
    client = blocking_client(line.url)
    ready = ReadyBatches(client, KEYS, block_s=0.1)
    assert await ready.pop() is None
    line.drop_replies = True
    began = time.monotonic()
    with pytest.raises(RedisUnavailable):
        await ready.pop()
    assert time.monotonic() - began < 0.1 + 1.0 + 0.5
    line.drop_replies = False
    await pool.queue(1)
    await pool.form([("free", 1)])

    async def popped() -> str | None:
        return await ready.pop()

    assert await eventually(popped, "the next read works") == "b1"
    assert line.accepted == 2
    await client.aclose()


async def test_bug_07_client_library_sends_lpush_again(pool: Pool, line: BadLine) -> None:
    """A client that retries by itself pushes twice when a reply is lost; here nothing is sent twice behind our back."""
    client = command_client(line.url)
    await client.ping()
    line.drop_replies = True

    with pytest.raises(RedisUnavailable):
        async with bounded():
            await client.lpush("queue:free", "once")

    assert line.sent(b"LPUSH") == 1
    assert await pool.client.llen("queue:free") == 1
    await client.aclose()


async def test_bug_07_an_admission_that_is_sent_again_is_one(pool: Pool, line: BadLine) -> None:
    """Where a call must be repeated it is idempotent: the admission whose reply was lost ran, and its repeat does nothing."""
    client = command_client(line.url)
    await pipelined(client).call((b"PING",), 1.0)
    admissions, asked = Admissions(client, KEYS, "g1"), [pool.submission()]
    line.drop_replies = True
    with pytest.raises(RedisUnavailable):
        await admissions.admit(WIDE, 0.0, asked)
    line.drop_replies = False

    verdicts = await admissions.admit(WIDE, 0.0, asked)

    assert [verdict.outcome for verdict in verdicts] == [Admission.DUPLICATE]
    assert await pool.depth("free") == 1
    accepted, _ = await pool.audit()
    assert [record.id for record in accepted] == [asked[0].id]
    await client.aclose()


async def test_bug_18_thundering_herd(pool: Pool, redis_url: str) -> None:
    """All sleepers wake for one item and all clients return at once; here one token wakes one, and returns are spread."""
    clients = [blocking_client(redis_url) for _ in range(3)]
    asleep = [asyncio.create_task(ReadyBatches(client, KEYS, block_s=5.0).pop()) for client in clients]
    await eventually(lambda: _blocked(pool, 3), "three workers block")
    await pool.queue(1)
    await pool.form([("free", 1)])

    woken, still = await asyncio.wait(asleep, return_when=asyncio.FIRST_COMPLETED)

    assert ([task.result() for task in woken], len(still)) == (["b1"], 2)
    assert await pool.client.llen(KEYS.wake) <= 1
    for task in still:
        task.cancel()
    await asyncio.gather(*still, return_exceptions=True)
    for client in clients:
        await client.aclose()
    delays = {Backoff(1.0, 1.0).next_s() for _ in range(20)}
    assert len(delays) > 10
    assert min(delays) < 0.5 < max(delays)
    told = [
        ErrorResponses(draw).answer(RequestError(ErrorCode.NO_CAPACITY), "r").headers
        for draw in (lambda: 0.0, lambda: 1.0)
    ]
    early, late = (int(dict(headers)["retry-after-ms"]) for headers in told)
    assert late == round(early * (1 + JITTER))


async def _blocked(pool: Pool, count: int) -> bool:
    return int((await pool.client.info("clients"))["blocked_clients"]) >= count


@pytest.mark.parametrize("verb", ["observe", "census", "reap"])
async def test_bug_19_layered_retries(pool: Pool, line: BadLine, verb: str) -> None:
    """Retries of three layers multiply to 27 calls; here no layer below the caller retries: one call is one send."""
    client = command_client(line.url)
    calls: dict[str, Callable[[], Coroutine[Any, Any, Any]]] = {
        "observe": lambda: Presence(client, KEYS).observe(TIERS),
        "census": Presence(client, KEYS).census,
        "reap": lambda: Terminations(client, KEYS).reap(0),
    }
    await calls[verb]()
    sent = line.sent(b"EVALSHA")
    line.drop_replies = True

    with pytest.raises(RedisUnavailable):
        await calls[verb]()

    assert line.sent(b"EVALSHA") - sent == 1
    assert await pool.client.ping()
    await client.aclose()


async def test_bug_30_a_cancelled_call_poisons_its_connection(pool: Pool, line: BadLine) -> None:
    """The reply to a cancelled call was handed to the next caller (CVE-2023-28858); here each caller gets its own."""
    await pool.client.set("mine", "my secret", px=60_000)
    await pool.client.set("yours", "your secret", px=60_000)
    client = command_client(line.url)
    line.delay_s = 0.01
    for i in range(12):
        for get in (client.get, lambda key: pipelined(client).call((b"GET", key), 1.0)):
            mine = asyncio.ensure_future(get("mine"))
            await asyncio.wait([mine], timeout=i * 0.0015)
            mine.cancel()
            assert await get("yours") == b"your secret"
            await asyncio.gather(mine, return_exceptions=True)
    await client.aclose()


async def test_bug_31_scripts_that_redis_forgot(pool: Pool) -> None:
    """NOSCRIPT after a restart or SCRIPT FLUSH broke every caller; here each verb sends its script again."""

    async def forgotten() -> None:
        await pool.client.script_flush()

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
    ):
        await forgotten()
        await step()

    assert await pool.states([request_id]) == ["completed"]


async def test_bug_34_eviction_and_a_full_server(pool: Pool) -> None:
    """A cache's eviction policy deletes the queue, and OOM stops the drain; here the one is refused and the other drains."""
    (request_id,) = await pool.queue(1)
    await pool.client.config_set("maxmemory-policy", "allkeys-lru")
    try:
        with pytest.raises(StartError, match="noeviction"):
            await check_server(pool.client)
        await pool.client.config_set("maxmemory-policy", "noeviction")
        await check_server(pool.client)
        limit = (await pool.client.config_get("maxmemory"))["maxmemory"]
        await pool.client.config_set("maxmemory", 1)
        try:
            verdicts = await pool.admit([pool.submission()])
            await pool.form([("free", 1)])
            assert await pool.batches.claim("b1", "w1", "token") is not None
            await pool.batches.finish("b1", "token", [done(request_id)])
            assert len((await pool.outbox.take(10)).entries) == 2
        finally:
            await pool.client.config_set("maxmemory", limit)
    finally:
        await pool.client.config_set("maxmemory-policy", "noeviction")

    assert [verdict.outcome for verdict in verdicts] == [Admission.BACKPRESSURE]
    assert await pool.states([request_id]) == ["completed"]


POLICY = BatchPolicy(4, 10.0, 4, 1000.0, [TierPolicy(name, i, 0.1) for i, name in enumerate(TIERS)])


async def test_bug_35_a_tight_error_loop_while_redis_is_away(
    pool: Pool, line: BadLine, redis_server: EmbeddedRedis
) -> None:
    """Loops spun, or died, while Redis was down; here each slows down, goes on, and works again when Redis is back."""
    blocking, subscribing, commands = blocking_client(line.url), subscriber_client(line.url), command_client(line.url)
    waker = Waker(blocking, KEYS, block_s=0.2)
    subscriber = ResponseSubscriber(subscribing, KEYS.responses("g1"), PendingRequests(), Results(commands, KEYS))
    reaper = Reaper(Terminations(commands, KEYS), Presence(commands, KEYS), lambda: TIERS, lambda: 0)
    loops = [waker, subscriber, reaper, Dispatcher(Batches(commands, KEYS), waker, lambda: POLICY, time.monotonic)]
    line.refuse = True
    tasks = [asyncio.create_task(loop.run()) for loop in loops]
    began = time.monotonic()
    await eventually(lambda: line.accepted >= 40, "forty tries")
    assert time.monotonic() - began > 0.4  # A loop that spins makes thousands in that time.
    line.refuse = False

    await eventually(subscriber.subscribed.is_set, "it is subscribed")
    await pool.worker_beats("w1")
    await pool.queue(1)
    await eventually(pool.pop, "a batch is formed")
    assert not any(task.done() for task in tasks)
    assert redis_server.alive
    await end_all(tasks)
    for client in (blocking, subscribing, commands):
        await client.aclose()
