"""Bugs of systems that reply by pub/sub: if a message is lost, the stored reply is found."""

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
class RunningRequest:
    """A request that runs, and is pending at gateway `g1`."""

    pool: Pool
    batch: ClaimedBatch
    pending: PendingRequest
    outcome: "asyncio.Future[Outcome]"

    async def finish(self) -> None:
        """The worker finishes it: the reply is stored, then published."""
        assert await self.pool.batches.finish(self.batch.batch_id, self.batch.token, [done(self.pending.id)]) == 0

    async def output(self) -> str:
        """The output that the gateway gets."""
        async with asyncio.timeout(5):
            reply = await self.outcome
        assert isinstance(reply, Reply)
        return reply.output


async def start(pending_requests: PendingRequests, pool: Pool) -> RunningRequest:
    """Start a request."""
    batch = await pool.running(1)
    outcome: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
    pending = PendingRequest(pool.submission(id=batch.requests[0].id), time.monotonic(), outcome.set_result)
    pending.verdict = Verdict(Admission.ACCEPTED, remaining(1.0))
    pending_requests.add(pending)
    return RunningRequest(pool, batch, pending, outcome)


@asynccontextmanager
async def subscribed(url: str, pool: Pool, pending_requests: PendingRequests) -> AsyncIterator[ResponseSubscriber]:
    """A gateway's subscription, acknowledged by Redis."""
    client = subscriber_client(url)
    subscriber = ResponseSubscriber(client, CHANNEL, pending_requests, pool.results)
    task = asyncio.create_task(subscriber.run())
    try:
        await eventually(subscriber.subscribed.is_set, "the subscription is acknowledged")
        yield subscriber
    finally:
        await end_all([task])
        await client.aclose()


async def test_bug_01_a_result_before_the_subscription(pool: Pool, redis_url: str) -> None:
    """A message without a subscriber is lost. Here the reply was stored, and is read after the subscription."""
    pending_requests = PendingRequests()
    request = await start(pending_requests, pool)
    assert await pool.client.pubsub_numsub(CHANNEL) == [(CHANNEL.encode(), 0)]
    await request.finish()

    async with subscribed(redis_url, pool, pending_requests):
        assert await request.output() == "olleh"


async def test_bug_02_a_result_between_two_connections(pool: Pool, line: BadLine) -> None:
    """Messages during a reconnect are lost. Here every new subscription reads the stored replies."""
    pending_requests = PendingRequests()
    async with subscribed(line.url, pool, pending_requests) as subscriber:
        request = await start(pending_requests, pool)
        line.refuse = True
        line.cut()
        await eventually(lambda: not subscriber.subscribed.is_set(), "the loss is detected")
        await request.finish()
        line.refuse = False

        assert await request.output() == "olleh"
        assert subscriber.reconnects >= 1


async def test_bug_03_a_half_open_connection(pool: Pool, line: BadLine) -> None:
    """A connection can be lost without a packet. Here an unanswered ping ends it."""
    pending_requests = PendingRequests()
    async with subscribed(line.url, pool, pending_requests) as subscriber:
        request = await start(pending_requests, pool)
        line.drop_replies = True
        began = time.monotonic()
        await request.finish()
        await eventually(lambda: not subscriber.subscribed.is_set(), "the loss is detected")
        assert time.monotonic() - began < PING_EVERY_S + PONG_WITHIN_S + 1.0
        line.drop_replies = False

        assert await request.output() == "olleh"


async def overflows(pool: Pool) -> int:
    """The number of clients that this server disconnected for the size of their output buffers."""
    return int((await pool.client.info("stats"))["client_output_buffer_limit_disconnections"])


async def test_bug_04_a_slow_subscriber_is_disconnected(pool: Pool, line: BadLine) -> None:
    """Redis disconnects a subscriber that reads too slowly, though PUBLISH counted it. Here lost replies are read afterwards."""
    pending_requests = PendingRequests()
    before = await overflows(pool)
    await pool.client.config_set("client-output-buffer-limit", "pubsub 262144 131072 1")
    try:
        async with subscribed(line.url, pool, pending_requests):
            request = await start(pending_requests, pool)
            line.stall()
            received = 0

            async def is_disconnected() -> bool:
                nonlocal received
                # Small messages: Valkey does not count large ones in the output buffer.
                for _ in range(50):
                    received += await pool.client.publish(CHANNEL, b"\xc1" * (1 << 13))
                return await overflows(pool) > before

            await eventually(is_disconnected, "the slow subscriber is disconnected")
            assert received > 1
            await request.finish()
            line.flow()

            assert await request.output() == "olleh"
    finally:
        await pool.client.config_set("client-output-buffer-limit", "pubsub 33554432 8388608 60")


async def test_bug_26_a_late_or_malformed_message_stops_no_reader(pool: Pool, redis_url: str) -> None:
    """A reply without a pending request raised in the reader and ended it. Here it is counted."""
    pending_requests = PendingRequests()
    async with subscribed(redis_url, pool, pending_requests) as subscriber:
        gone = await start(pending_requests, pool)
        pending_requests.remove(gone.pending)
        await gone.finish()
        await pool.client.publish(CHANNEL, b"\xc1")
        await eventually(lambda: pending_requests.unknown_replies == 1, "the late reply is counted")
        await eventually(lambda: subscriber.malformed == 1, "the malformed message is counted")

        request = await start(pending_requests, pool)
        await request.finish()
        assert await request.output() == "olleh"
        assert subscriber.reconnects == 0
