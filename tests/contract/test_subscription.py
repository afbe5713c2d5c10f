"""The reader of a subscribed channel."""

import asyncio

import pytest
from redis.exceptions import ConnectionError  # noqa: A004 - redis-py's

from eventually import eventually
from pool import Pool
from scheduler.redis_client.connections import subscriber_client
from scheduler.redis_client.subscription import subscribe

CHANNEL = "responses:g1"


async def test_messages_come_in_order_one_in_each_iteration_of_the_loop(pool: Pool, redis_url: str) -> None:
    """Callbacks that a message made ready run before the next message."""
    client, seen = subscriber_client(redis_url), list[bytes]()

    def take(message: bytes) -> None:
        seen.append(message)
        asyncio.get_running_loop().call_soon(seen.append, b"between")

    subscription = await subscribe(client, CHANNEL, take)
    pipeline = pool.client.pipeline(transaction=False)
    for number in range(20):
        pipeline.publish(CHANNEL, b"%d" % number + b"x" * 10_000)
    await pipeline.execute()
    await eventually(lambda: len(seen) == 40, "all messages")

    assert [message[:7] for message in seen] == [
        each for number in range(20) for each in ((b"%d" % number + b"x" * 7)[:7], b"between")
    ]
    subscription.ping()
    await eventually(lambda: subscription.ponged, "the ping is answered")
    subscription.close()
    await client.aclose()


async def test_the_end_of_a_subscription_is_raised(pool: Pool, redis_url: str) -> None:
    """A lost connection, an exception of the reader, and a rejected command are reported where `over` is awaited."""
    client = subscriber_client(redis_url)

    def junk(message: bytes) -> None:
        raise KeyError(message)

    subscription = await subscribe(client, CHANNEL, junk)
    await pool.client.client_kill_filter(_type="pubsub")
    with pytest.raises(ConnectionError):
        await subscription.over

    subscription = await subscribe(client, CHANNEL, junk)
    await pool.client.publish(CHANNEL, b"message")
    with pytest.raises(KeyError):
        await subscription.over

    async def unsubscribed() -> bool:
        return bool((await pool.client.pubsub_numsub(CHANNEL))[0][1] == 0)

    await eventually(unsubscribed, "its connection is closed")

    await client.aclose()
    with pytest.raises(ConnectionError):
        await subscribe(client, CHANNEL, junk)
