"""Bugs of systems that answer by pub/sub: whatever a message loses, the stored reply is found."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from customer_limits import remaining
from eventually import eventually
from gateway.inference.pending import Outcome, PendingRequest, PendingRequests
from gateway.inference.responses import PING_EVERY_S, PONG_WITHIN_S, ResponseSubscriber
from pool import Pool, done
from regressions.bad_line import BadLine
from scheduler.protocol.admission import Verdict
from scheduler.protocol.batches import ClaimedBatch
from scheduler.protocol.replies import Reply
from scheduler.redis_client.connections import subscriber_client
from scheduler.redis_client.keys import Keys
from scheduler.states import Admission
from scheduler.tasks import end_all

CHANNEL = Keys().responses("g1")


@dataclass
class Waiting:
    """A request that runs, and whoever waits for it at gateway `g1`."""

    pool: Pool
    batch: ClaimedBatch
    pending: PendingRequest
    outcome: "asyncio.Future[Outcome]"

    async def finish(self) -> None:
        """The worker ends it: the reply is stored, then published."""
        assert await self.pool.batches.finish(self.batch.batch_id, self.batch.token, [done(self.pending.id)]) == 0

    async def answered(self, timeout_s: float = 5.0) -> Reply:
        async with asyncio.timeout(timeout_s):
            reply = await self.outcome
        assert isinstance(reply, Reply)
        return reply


async def wait_at(pending_requests: PendingRequests, pool: Pool) -> Waiting:
    """One running request with a waiter."""
    batch = await pool.running(1)
    submission = pool.submission(id=batch.requests[0].id)
    outcome: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
    pending = PendingRequest(submission, time.monotonic(), outcome.set_result)
    pending.verdict = Verdict(Admission.ACCEPTED, remaining(1.0))
    pending_requests.add(pending)
    return Waiting(pool, batch, pending, outcome)


@asynccontextmanager
async def listening(url: str, pool: Pool, pending_requests: PendingRequests) -> AsyncIterator[ResponseSubscriber]:
    """A gateway's subscription that has been acknowledged."""
    client = subscriber_client(url)
    subscriber = ResponseSubscriber(client, CHANNEL, pending_requests, pool.results)
    task = asyncio.create_task(subscriber.run())
    try:
        await eventually(subscriber.subscribed.is_set, "the subscription is acknowledged")
        yield subscriber
    finally:
        await end_all([task])
        await client.aclose()


async def test_bug_01_publish_before_subscribe(pool: Pool, redis_url: str) -> None:
    """A result published before anybody listens is gone; here it was stored first and is read with the subscription."""
    pending_requests = PendingRequests()
    waiting = await wait_at(pending_requests, pool)
    assert await pool.client.pubsub_numsub(CHANNEL) == [(CHANNEL.encode(), 0)]
    await waiting.finish()

    async with listening(redis_url, pool, pending_requests):
        assert (await waiting.answered()).output == "olleh"


async def test_bug_02_reconnect_loses_what_came_meanwhile(pool: Pool, line: BadLine) -> None:
    """Messages sent between two connections strand their waiters; here every new subscription reads stored replies."""
    pending_requests = PendingRequests()
    async with listening(line.url, pool, pending_requests) as subscriber:
        waiting = await wait_at(pending_requests, pool)
        line.refuse = True
        line.cut()
        await eventually(lambda: not subscriber.subscribed.is_set(), "the loss is noticed")
        await waiting.finish()
        line.refuse = False

        assert (await waiting.answered()).output == "olleh"
        assert subscriber.reconnects >= 1


async def test_bug_03_half_open_subscriber(pool: Pool, line: BadLine) -> None:
    """A connection that died without a word looks alive for ever; here a ping that is not answered ends it."""
    pending_requests = PendingRequests()
    async with listening(line.url, pool, pending_requests) as subscriber:
        waiting = await wait_at(pending_requests, pool)
        line.drop_replies = True
        began = time.monotonic()
        await waiting.finish()
        await eventually(lambda: not subscriber.subscribed.is_set(), "the silence is noticed")
        assert time.monotonic() - began < PING_EVERY_S + PONG_WITHIN_S + 1.0
        line.drop_replies = False

        assert (await waiting.answered()).output == "olleh"


async def test_bug_04_output_buffer_overflow_drops_the_subscriber(pool: Pool, line: BadLine) -> None:
    """Redis drops a subscriber that reads too slowly, PUBLISH still says 1; here what was lost is read afterwards."""
    pending_requests = PendingRequests()
    before = await overflows(pool)
    await pool.client.config_set("client-output-buffer-limit", "pubsub 262144 131072 1")
    try:
        async with listening(line.url, pool, pending_requests):
            waiting = await wait_at(pending_requests, pool)
            line.stall()
            sent = 0

            async def dropped() -> bool:
                nonlocal sent
                # Small ones: Valkey only refers to a large message from its output buffers, and does not count it there.
                for _ in range(50):
                    sent += await pool.client.publish(CHANNEL, b"\xc1" * (1 << 13))
                return await overflows(pool) > before

            await eventually(dropped, "the subscriber that does not read is dropped")
            assert sent > 1  # PUBLISH said every time that somebody had got it.
            await waiting.finish()
            line.flow()

            assert (await waiting.answered()).output == "olleh"
    finally:
        await pool.client.config_set("client-output-buffer-limit", "pubsub 33554432 8388608 60")


async def overflows(pool: Pool) -> int:
    """How many clients this server has dropped for the size of their output buffer."""
    return int((await pool.client.info("stats"))["client_output_buffer_limit_disconnections"])


async def test_bug_26_late_result_for_a_gone_waiter_kills_the_reader(pool: Pool, redis_url: str) -> None:
    """A reply for somebody who left raised in the reader and ended it; here it is counted, and the next one arrives."""
    pending_requests = PendingRequests()
    async with listening(redis_url, pool, pending_requests) as subscriber:
        gone = await wait_at(pending_requests, pool)
        pending_requests.remove(gone.pending)
        await gone.finish()
        await pool.client.publish(CHANNEL, b"\xc1")
        await eventually(lambda: pending_requests.unknown_replies == 1, "the late reply is counted")
        await eventually(lambda: subscriber.malformed == 1, "the bad message is counted")

        waiting = await wait_at(pending_requests, pool)
        await waiting.finish()
        assert (await waiting.answered()).output == "olleh"
        assert subscriber.reconnects == 0
