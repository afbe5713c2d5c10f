"""What the gateway does when clients leave, replies are lost, Redis hangs, or it is told to go itself."""

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import aiohttp
import pytest
from redis.asyncio import Redis

from eventually import eventually
from gateway.app import run_gateway
from gateway.config import GatewayConfig
from gateway.inference.deadlines import LEAD_S
from integration.gateway_fixtures import SERVICE_TOKEN, LiteralCatalog, Stack, TestWorker, head_of, running_stack
from scheduler.redis_client.keys import Keys
from tierlane.embedded.redis import EmbeddedRedis


@pytest.fixture
def hung(redis_server: EmbeddedRedis) -> Iterator[Any]:
    """Stops Redis as SIGSTOP does; it goes on after the test at the latest."""
    yield lambda: os.kill(redis_server.pid, signal.SIGSTOP)
    os.kill(redis_server.pid, signal.SIGCONT)


async def admitted(stack: Stack, count: int = 1) -> None:
    """Wait until so many requests are queued."""
    pending_requests = stack.gateway.pending_requests
    await eventually(
        lambda: sum(w.verdict is not None for w in pending_requests.all()) == count, f"{count} are admitted"
    )


async def test_a_client_that_leaves_has_its_queued_request_cancelled(client: Redis, redis_url: str) -> None:
    """Seen well within 250 ms: no waiter stays, and Redis says failed, cancelled."""
    async with running_stack(client, redis_url, worker=False) as stack:
        asking = asyncio.create_task(stack.infer())
        await admitted(stack)
        (waiting,) = stack.gateway.pending_requests.all()
        asking.cancel()

        async def cancelled() -> bool:
            return await client.hget(Keys().request(waiting.id), "code") == b"cancelled"

        await eventually(cancelled, "the request is cancelled", 1.0)
        assert len(stack.gateway.pending_requests) == 0


async def test_a_storm_of_disconnects_leaves_nothing(client: Redis, redis_url: str) -> None:
    """Fifty leave at once: no waiter, no pending cancel, and few calls."""
    async with running_stack(client, redis_url, worker=False) as stack:
        asking = [asyncio.create_task(stack.infer()) for _ in range(50)]
        await admitted(stack, 50)
        ids = [waiting.id for waiting in stack.gateway.pending_requests.all()]
        for task in asking:
            task.cancel()

        async def all_cancelled() -> bool:
            return all([await client.hget(Keys().request(each), "code") == b"cancelled" for each in ids])

        await eventually(all_cancelled, "all are cancelled")
        assert (len(stack.gateway.pending_requests), len(stack.gateway.cancellations)) == (0, 0)


async def test_the_deadline_is_answered_in_time_and_ends_the_request(client: Redis, redis_url: str) -> None:
    """504 at the deadline and not 100 ms later; Redis has the same end."""
    async with running_stack(client, redis_url, worker=False, total_ms=500) as stack:
        began = time.monotonic()
        status, document, headers = await stack.infer()
        took_s = time.monotonic() - began

        assert (status, document["error"]["code"], headers["x-should-retry"]) == (504, "deadline_exceeded", "false")
        assert 0.5 - LEAD_S <= took_s < 0.65
        stored = await client.hget(Keys().request(document["error"]["request_id"]), "code")
        assert stored == b"deadline_exceeded"


async def test_an_admission_that_redis_takes_up_after_the_deadline_leaves_nothing(
    client: Redis, redis_url: str, hung: Any, redis_server: EmbeddedRedis
) -> None:
    """The call lies in the socket of a stopped Redis; when that goes on, the client was answered long ago."""
    async with running_stack(client, redis_url, worker=False, total_ms=400) as stack:
        await eventually(stack.gateway.heartbeat.redis_ms, "the clock of Redis is known")
        await stack.infer()  # So that Redis has the script.
        hung()
        began = time.monotonic()
        status, document, _ = await stack.infer()
        await eventually(lambda: time.monotonic() > began + 0.8, "the time of the request is over")
        os.kill(redis_server.pid, signal.SIGCONT)
        await eventually(lambda: stack.gateway.heartbeat.redis_problem is None, "Redis is back")
        await eventually(lambda: not len(stack.gateway.cancellations), "the gateway has ended what it refused")

        assert (status, document["error"]["code"]) in ((503, "no_capacity"), (504, "deadline_exceeded"))
        assert await client.hget(Keys().request(document["error"]["request_id"]), "at") is None


async def test_a_result_that_only_pubsub_lost_is_still_the_answer(client: Redis, redis_url: str) -> None:
    """The message never comes, but at the deadline the stored result is found and wins over 504."""
    async with running_stack(client, redis_url, worker=False, total_ms=500) as stack:
        stack.gateway.subscriber.deliver = lambda message: None  # type: ignore[method-assign]
        asking = asyncio.create_task(stack.infer())
        await admitted(stack)
        await stack.worker.turn()
        status, document, _ = await asking

        assert (status, document["output"]) == (200, "olleh")


async def test_the_slow_look_finds_lost_results_before_the_deadline(client: Redis, redis_url: str) -> None:
    """Once a second the stored results of whoever waits so long are read."""
    async with running_stack(client, redis_url, worker=False, total_ms=20_000) as stack:
        stack.gateway.subscriber.deliver = lambda message: None  # type: ignore[method-assign]
        asking = asyncio.create_task(stack.infer())
        await admitted(stack)
        await stack.worker.turn()
        status, document, _ = await asking

        assert status == 200
        assert document["metadata"]["latency_ms"] < 15_000  # The look at the deadline would take all of the 20 s.


async def test_a_lost_subscription_is_made_again_and_caught_up(client: Redis, redis_url: str) -> None:
    """Results published while nobody listened are read on reconnect; later ones come by message again."""
    async with running_stack(client, redis_url, worker=False) as stack:
        subscriber = stack.gateway.subscriber
        asking = asyncio.create_task(stack.infer())
        await admitted(stack)
        await client.execute_command("CLIENT", "KILL", "TYPE", "pubsub")
        await stack.worker.turn()
        status, document, _ = await asking
        assert (status, document["metadata"]["latency_ms"] < 1500) == (200, True)

        await eventually(subscriber.subscribed.is_set, "it is subscribed again")
        asking = asyncio.create_task(stack.infer())
        await admitted(stack)
        await stack.worker.turn()
        assert (await asking)[0] == 200


async def test_junk_on_the_channel_is_counted_and_dropped(client: Redis, redis_url: str) -> None:
    """Garbage, a reply for nobody and a reply with a wrong nonce change nothing."""
    async with running_stack(client, redis_url) as stack:
        channel = Keys().responses("g1")
        for junk in (b"", b"\xc1", b"junk" * 100, b"\x91\x93\x01\x02\x03", b"\x80"):
            await client.publish(channel, junk)
        await eventually(lambda: stack.gateway.subscriber.malformed == 5, "five are counted")

        assert (await stack.infer())[0] == 200
        assert stack.gateway.subscriber.reconnects == 0


async def test_a_hung_redis_refuses_soon_and_is_noticed(client: Redis, redis_url: str, hung: Any) -> None:
    """New requests get 503 within a second, waiting ones 504 at their deadline, and all is well afterwards."""
    async with running_stack(client, redis_url, worker=False, total_ms=1500) as stack:
        waiting = asyncio.create_task(stack.infer())
        await admitted(stack)
        began = time.monotonic()
        hung()
        status, document, _ = await stack.infer()
        refused_s = time.monotonic() - began
        assert (status, document["error"]["code"]) == (503, "no_capacity")
        assert refused_s < 1.0
        status, document, _ = await waiting
        assert (status, document["error"]["code"]) == (504, "deadline_exceeded")
        assert time.monotonic() - began < 1.7
        await eventually(lambda: not stack.gateway.subscriber.subscribed.is_set(), "the lost ping is noticed", 3.0)
        status, health = await stack.internal("/internal/health")
        assert health["status"] != "healthy"
        async with stack.http.get(stack.url + "/readyz") as answer:
            assert answer.status == 200


async def test_after_a_hang_the_gateway_recovers_by_itself(
    client: Redis, redis_url: str, redis_server: EmbeddedRedis, hung: Any
) -> None:
    """Once Redis answers again requests are served, and what was admitted unheard does not run for nobody."""
    async with running_stack(client, redis_url, worker=False) as stack:
        hung()
        status, document, _ = await stack.infer()
        assert status == 503
        os.kill(redis_server.pid, signal.SIGCONT)
        await eventually(stack.gateway.subscriber.subscribed.is_set, "it is subscribed again")
        await eventually(lambda: not stack.gateway.direct.active, "requests go through Redis again")
        await eventually(lambda: len(stack.gateway.cancellations) == 0, "the indeterminate id is ended")
        stored = await client.hgetall(Keys().request(document["error"]["request_id"]))
        assert stored.get(b"state") in (None, b"failed")
        asking = asyncio.create_task(stack.infer())
        await admitted(stack)
        await eventually(lambda: _served(stack, asking), "it is served")
        assert (await asking)[0] == 200


async def _served(stack: Stack, asking: "asyncio.Task[Any]") -> bool:
    await stack.worker.turn()
    return asking.done()


class Leaving:
    """`run_gateway` in this process, to be ended by a real SIGTERM."""

    def __init__(self, redis_url: str, **changes: Any) -> None:
        settings: dict[str, Any] = {
            "gateway_id": "g1",
            "redis_url": redis_url,
            "service_token": SERVICE_TOKEN,
            "port": 0,
            "reuse_port": False,
            "drain_ms": 200,
        }
        self.catalog = LiteralCatalog()
        self.port: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        config = GatewayConfig(**settings | changes)
        self.task = asyncio.create_task(run_gateway(config, self.catalog, on_ready=self.port.set_result))

    async def infer(self, http: aiohttp.ClientSession) -> tuple[int, Any]:
        headers = {"Authorization": f"Bearer {self.catalog.keys['free'].text}"}
        url = f"http://127.0.0.1:{await self.port}/v1/inference"
        async with http.post(url, json={"input": "hello"}, headers=headers) as answer:
            return answer.status, await answer.json()

    async def readyz(self, http: aiohttp.ClientSession) -> int:
        async with http.get(f"http://127.0.0.1:{await self.port}/readyz") as answer:
            return answer.status


async def test_sigterm_finishes_what_was_accepted(client: Redis, redis_url: str) -> None:
    """Not ready at once, still serving for a while, accepted requests answered, then gone from Redis."""
    worker = TestWorker(client, Keys())
    await worker.heartbeat()
    leaving = Leaving(redis_url)
    async with aiohttp.ClientSession() as http:
        assert await leaving.readyz(http) == 200
        asking = asyncio.create_task(leaving.infer(http))
        await eventually(lambda: client.llen(Keys().queue("free")), "it is queued")
        os.kill(os.getpid(), signal.SIGTERM)

        async def not_ready() -> bool:
            return await leaving.readyz(http) == 503

        await eventually(not_ready, "it is not ready", 1.0)
        second = asyncio.create_task(leaving.infer(http))

        async def both_queued() -> bool:
            return await client.llen(Keys().queue("free")) == 2

        await eventually(both_queued, "it still serves", 1.0)
        await worker.turn()
        assert [(await asking)[0], (await second)[0]] == [200, 200]
        await leaving.task
    assert not await client.exists(Keys().gateway("g1"))


async def test_sigterm_answers_the_rest_503(client: Redis, redis_url: str) -> None:
    """What is not done within the drain time is refused as draining, ended in Redis, and the process ends."""
    await TestWorker(client, Keys()).heartbeat()
    leaving = Leaving(redis_url, drain_ms=0, drain_timeout_s=0.3)
    async with aiohttp.ClientSession() as http:
        asking = asyncio.create_task(leaving.infer(http))
        await eventually(lambda: client.llen(Keys().queue("free")), "it is queued")
        os.kill(os.getpid(), signal.SIGTERM)
        status, document = await asking
        await leaving.task

    assert (status, document["error"]["code"]) == (503, "draining")
    assert await client.hget(Keys().request(document["error"]["request_id"]), "code") == b"draining"


async def test_idle_connections_are_closed_when_the_doors_close(client: Redis, redis_url: str) -> None:
    """A kept-alive connection that asks nothing is not left to hear nothing."""
    await TestWorker(client, Keys()).heartbeat()
    leaving = Leaving(redis_url, drain_ms=0, drain_timeout_s=2.0)
    reader, writer = await asyncio.open_connection("127.0.0.1", await leaving.port)
    writer.write(b"GET /livez HTTP/1.1\r\nHost: a\r\n\r\n")
    assert b"200 OK" in await reader.readuntil(b"\r\n\r\n")
    os.kill(os.getpid(), signal.SIGTERM)
    async with asyncio.timeout(1.0):
        assert (await reader.read()).endswith(b'{"status":"ok"}')
    writer.close()
    await leaving.task


async def test_a_body_that_is_on_its_way_when_the_doors_close_is_answered(client: Redis, redis_url: str) -> None:
    """Its rest is not waited for: the client is told to try again, and not cut off."""
    await TestWorker(client, Keys()).heartbeat()
    leaving = Leaving(redis_url, drain_ms=0)
    reader, writer = await asyncio.open_connection("127.0.0.1", await leaving.port)
    lines = [
        "POST /v1/inference HTTP/1.1",
        "Host: gateway",
        f"Authorization: Bearer {leaving.catalog.keys['free'].text}",
        "Content-Length: 17",
        "Expect: 100-continue\r\n\r\n",
    ]
    writer.write("\r\n".join(lines).encode())
    assert b" 100 " in await reader.readuntil(b"\r\n\r\n")
    os.kill(os.getpid(), signal.SIGTERM)
    async with asyncio.timeout(2.0):
        status, headers, document = head_of(await reader.read())
    writer.close()
    await leaving.task

    assert (status, document["error"]["code"], headers["connection"]) == (503, "draining", "close")
