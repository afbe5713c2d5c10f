"""Failover with Sentinel: every kind of client uses the next primary, and each call is bounded."""

import asyncio
import signal
import time

import pytest
from redis.asyncio import Redis
from redis.exceptions import ConnectionError  # noqa: A004 - redis-py's

from eventually import eventually
from gateway.inference.pending import PendingRequests
from gateway.inference.responses import ResponseSubscriber
from integration.sentinel_fixtures import Failover, failover, failover_client
from pool import Pool
from scheduler.errors import RedisUnavailable, StartError
from scheduler.protocol.ready_batches import ReadyBatches
from scheduler.protocol.replies import Results
from scheduler.redis_client.connections import blocking_client, bounded, check_server, command_client, subscriber_client
from scheduler.redis_client.keys import Keys
from scheduler.redis_client.sentinel import SentinelUrl, parse, primary_of

__all__ = ["failover", "failover_client"]


async def write(client: Redis) -> bool:
    """Whether a write succeeds; every attempt is bounded."""
    began = time.monotonic()
    try:
        async with bounded():
            await client.set("canary", "1", px=60_000)
    except RedisUnavailable:
        return False
    finally:
        assert time.monotonic() - began < 1.0
    return True


async def test_commands_and_scripts_use_the_next_primary(failover: Failover, failover_client: Redis) -> None:
    """Calls fail within their bound until the replica is promoted. Scripts are sent to it again."""
    await check_server(failover_client)
    pool = Pool(failover_client, Keys())
    await pool.queue(1)

    failover.kill_primary()

    assert not await write(failover_client)
    await eventually(lambda: write(failover_client), "a write on the next primary", 20.0)
    assert await pool.states(await pool.queue(1)) == ["queued"]


async def test_a_suspended_primary_gets_no_writes_afterwards(failover: Failover, failover_client: Redis) -> None:
    """While the primary is suspended the replica is promoted; when it resumes, no write goes to it."""
    assert await write(failover_client)
    failover.signal_primary(signal.SIGSTOP)
    await eventually(lambda: write(failover_client), "a write on the next primary", 20.0)
    failover.signal_primary(signal.SIGCONT)

    async def written_to_the_next_only() -> bool:
        if not await write(failover_client):
            return False
        async with bounded():
            return int((await failover_client.info("server"))["tcp_port"]) == failover.ports[1]

    for _ in range(20):
        await eventually(written_to_the_next_only, "writes go to the next primary")


async def test_blocking_reads_and_subscriptions_use_the_next_primary(
    failover: Failover, failover_client: Redis
) -> None:
    """A worker's BLPOP and a gateway's subscription."""
    blocking, listening = blocking_client(failover.url), subscriber_client(failover.url)
    ready = ReadyBatches(blocking, Keys(), 0.2)
    pending_requests = PendingRequests()
    subscriber = ResponseSubscriber(listening, "responses:g1", pending_requests, Results(failover_client, Keys()))
    loop = asyncio.create_task(subscriber.run())
    await eventually(subscriber.subscribed.is_set, "subscribed to the first primary")
    assert await ready.pop() is None

    failover.kill_primary()
    await eventually(lambda: write(failover_client), "a write on the next primary", 20.0)

    async def pushed_and_popped() -> bool:
        try:
            async with bounded():
                await failover_client.lpush("batch_queue", "b1")
            return await ready.pop() == "b1"
        except RedisUnavailable:
            return False

    await eventually(pushed_and_popped, "a pop on the next primary", 10.0)
    await eventually(subscriber.subscribed.is_set, "subscribed to the next primary", 10.0)
    async with bounded():
        assert await failover_client.publish("responses:g1", b"junk") == 1
    await eventually(lambda: subscriber.malformed == 1, "the message is received")
    loop.cancel()
    await asyncio.gather(loop, return_exceptions=True)
    await failover_client.delete("batch_queue")
    await blocking.aclose()
    await listening.aclose()


async def test_without_a_sentinel_redis_is_unavailable() -> None:
    """A call fails within its bound."""
    client = command_client("redis+sentinel://127.0.0.1:1,127.0.0.1:2/primary")

    assert not await write(client)

    await client.aclose()


@pytest.mark.parametrize("flags", [b"master,s_down", b"master,s_down,o_down,disconnected", b"slave"])
def test_a_primary_that_sentinel_reports_as_down_is_not_used(flags: bytes) -> None:
    """In the forms of both protocols."""
    good = {b"name": b"p", b"ip": b"::1", b"port": b"6379", b"flags": b"master"}
    flat = [part for pair in good.items() for part in pair]

    assert primary_of(good) == primary_of(flat) == ("::1", 6379)
    with pytest.raises(ConnectionError, match="down"):
        primary_of(good | {b"flags": flags})


def test_a_sentinel_url_is_parsed() -> None:
    """Several Sentinels, the default port, credentials, service and database."""
    assert parse("redis+sentinel://us%40er:pass@a:1,b,[::1]:3/primary/2") == SentinelUrl(
        [("a", 1), ("b", 26379), ("::1", 3)],
        "primary",
        2,
        {"username": "us@er", "password": "pass"},
        tls=False,
        tls_files={},
        sentinel_tls=False,
        sentinel_login={},
    )
    assert parse("rediss+sentinel://a/primary").tls


def test_a_sentinel_url_has_a_login_for_the_sentinels() -> None:
    """Percent-encoded, apart from that of the servers, with and without TLS; a plus sign is none of a space."""
    text = "redis+sentinel://:data@a/primary?sentinel_user=us%26er&sentinel_password=a+b%2F%3D"
    for url in (text, text.replace("redis", "rediss", 1) + "&sentinel_tls=on"):
        parsed = parse(url)
        assert parsed.sentinel_login == {"username": "us&er", "password": "a+b/="}
        assert parsed.credentials == {"password": "data"}


def test_a_sentinel_url_names_certificates() -> None:
    """For the servers, and for the Sentinels parsed these speak TLS."""
    url = "rediss+sentinel://a/primary?ssl_ca_certs=/tls/ca.crt&ssl_certfile=/tls/tls.crt&ssl_keyfile=/tls/tls.key"
    files = {"ssl_ca_certs": "/tls/ca.crt", "ssl_certfile": "/tls/tls.crt", "ssl_keyfile": "/tls/tls.key"}

    used = {}
    for text, tls in ((url, False), (url + "&sentinel_tls=on", True)):
        parsed = parse(text)
        assert (parsed.tls_files, parsed.sentinel_tls) == (files, tls)
        pool = command_client(text).connection_pool
        assert files.items() <= pool.connection_kwargs.items()
        used[tls] = pool._asking
    assert files.items() <= used[True].items()
    assert not files.keys() & used[False].keys()


@pytest.mark.parametrize(
    ("url", "names"),
    [
        ("redis+sentinel://a:1", "service"),
        ("redis+sentinel://a:1/primary/x", "'x'"),
        ("redis+sentinel://a:1,:2/primary", "':2'"),
        ("redis+sentinel://a:z/primary", "'a:z'"),
        ("redis+sentinel://a/primary?ssl_certfile=x", "'ssl_certfile'"),
        ("rediss+sentinel://a/primary?ssl_cert=x", "'ssl_cert'"),
        ("rediss+sentinel://a/primary?sentinel_tls=yes", "'yes'"),
        ("redis+sentinel://a/primary?sentinel_tls=on", "'sentinel_tls'"),
        ("redis+sentinel://a/primary?sentinel_user=x", "no sentinel_password"),
    ],
)
def test_an_invalid_sentinel_url(url: str, names: str) -> None:
    """The error names the invalid part."""
    with pytest.raises(StartError, match=names):
        parse(url)
