"""The gateway when clients disconnect, when Redis hangs, loses its data or runs full, and when it is stopped by SIGTERM."""

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import aiohttp
import pytest
from redis.asyncio import Redis

from configs import gateway_config
from eventually import eventually
from gateway.app import run_gateway
from integration.gateway_fixtures import (
    SERVICE_TOKEN,
    TIERS,
    LiteralCatalog,
    TestWorker,
    accepted,
    head_of,
    request_bytes,
    running_stack,
    served,
)
from pool import Pool
from scheduler.redis_client.keys import Keys
from tierlane_local.embedded.redis import EmbeddedRedis

ALL_BUT_THE_EPOCH = "for _, k in ipairs(redis.call('KEYS', '*')) do if k ~= 'epoch' then redis.call('DEL', k) end end"


@pytest.fixture
def send_redis(redis_server: EmbeddedRedis) -> Iterator[Callable[[int], None]]:
    """Sends a signal to Redis, which is resumed after the test at the latest."""
    yield lambda number: os.kill(redis_server.pid, number)
    os.kill(redis_server.pid, signal.SIGCONT)


async def test_disconnected_clients_have_their_requests_cancelled(client: Redis, redis_url: str) -> None:
    """Fifty clients disconnect at once: all requests end as cancelled within a second, and none stays pending."""
    async with running_stack(client, redis_url, worker=False) as stack:
        tasks = [asyncio.create_task(stack.infer()) for _ in range(50)]
        await accepted(stack, 50)
        ids = [pending.id for pending in stack.gateway.pending_requests.all()]
        for task in tasks:
            task.cancel()

        async def all_cancelled() -> bool:
            return all([await client.hget(Keys().request(each), "code") == b"cancelled" for each in ids])

        await eventually(all_cancelled, "all are cancelled", 1.0)
        assert (len(stack.gateway.pending_requests), len(stack.gateway.cancellations)) == (0, 0)


async def test_lost_replies_are_found_before_the_deadline(client: Redis, redis_url: str) -> None:
    """Without a published reply the periodic read of stored results returns the output long before the deadline."""
    async with running_stack(client, redis_url, worker=False, total_ms=20_000) as stack:
        stack.gateway.subscriber.deliver = lambda message: None
        task = asyncio.create_task(stack.infer())
        await accepted(stack)
        await stack.worker.turn()
        status, document, _ = await task

        assert (status, document["output"]) == (200, "olleh")
        assert document["metadata"]["latency_ms"] < 15_000


async def test_a_hung_redis(client: Redis, redis_url: str, send_redis: Callable[[int], None]) -> None:
    """New requests get 503 within a second, pending ones 504 at their deadline. When Redis is back, requests are served
    again, and a request whose admission was indeterminate does not run.
    """
    async with running_stack(client, redis_url, worker=False, total_ms=1500) as stack:
        pending = asyncio.create_task(stack.infer())
        await accepted(stack)
        began = time.monotonic()
        send_redis(signal.SIGSTOP)
        status, rejected, _ = await stack.infer()
        assert (status, rejected["error"]["code"]) == (503, "no_capacity")
        assert time.monotonic() - began < 1.0
        status, document, _ = await pending
        assert (status, document["error"]["code"]) == (504, "deadline_exceeded")
        assert time.monotonic() - began < 1.7
        await eventually(lambda: not stack.gateway.subscriber.subscribed.is_set(), "the lost ping is noticed", 3.0)
        status, health = await stack.internal("/internal/health")
        assert health["status"] != "healthy"
        async with stack.http.get(stack.url + "/readyz") as response:
            assert response.status == 200
        send_redis(signal.SIGCONT)
        await eventually(stack.gateway.subscriber.subscribed.is_set, "it is subscribed again")
        await eventually(lambda: not stack.gateway.direct.active, "requests go through Redis again")
        await eventually(lambda: len(stack.gateway.cancellations) == 0, "the indeterminate id is ended")
        stored = await client.hgetall(Keys().request(rejected["error"]["request_id"]))
        assert stored.get(b"state") in (None, b"failed")
        await stack.worker.heartbeat()
        await eventually(lambda: not stack.gateway.limits.no_gpu(time.monotonic()), "the worker is seen")
        task = asyncio.create_task(stack.infer())
        await eventually(lambda: served(stack, task), "it is served")
        assert (await task)[0] == 200


async def test_sigterm_completes_accepted_requests(client: Redis, redis_url: str) -> None:
    """After the signal the gateway is not ready, serves during the drain time, completes all requests and leaves Redis."""
    worker = TestWorker(client, Keys())
    await worker.heartbeat()
    catalog = LiteralCatalog()
    port: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    config = gateway_config(redis_url=redis_url, service_token=SERVICE_TOKEN, notice_ms=200)
    process = asyncio.create_task(run_gateway(config, catalog, on_ready=port.set_result))
    url = f"http://127.0.0.1:{await port}"

    async def infer() -> int:
        headers = {"Authorization": f"Bearer {catalog.keys['free'].text}"}
        async with http.post(f"{url}/v1/inference", json={"input": "hello"}, headers=headers) as response:
            return response.status

    async def reached(readiness: int, queued: int) -> bool:
        async with http.get(f"{url}/readyz") as response:
            return response.status == readiness and await client.llen(Keys().queue("free")) == queued

    async with aiohttp.ClientSession() as http:
        first = asyncio.create_task(infer())
        await eventually(lambda: reached(200, 1), "a request is queued")
        os.kill(os.getpid(), signal.SIGTERM)
        await eventually(lambda: reached(503, 1), "the gateway is not ready", 1.0)
        second = asyncio.create_task(infer())
        await eventually(lambda: reached(503, 2), "it still serves", 1.0)
        await worker.turn()
        assert [await first, await second] == [200, 200]
        await process
    assert not await client.exists(Keys().gateway("g1"))


async def test_a_second_signal_ends_the_drain(client: Redis, redis_url: str) -> None:
    """Without one, notice and open requests would be waited for ten minutes."""
    worker, catalog = TestWorker(client, Keys()), LiteralCatalog()
    await worker.heartbeat()
    port: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    config = gateway_config(redis_url=redis_url, service_token=SERVICE_TOKEN, total_ms=600_000)
    process = asyncio.create_task(run_gateway(config, catalog, on_ready=port.set_result))
    url = f"http://127.0.0.1:{await port}"

    async def queued() -> bool:
        return await client.llen(Keys().queue("free")) == 1

    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {catalog.keys['free'].text}"}) as http:

        async def infer() -> tuple[int, str]:
            async with http.post(f"{url}/v1/inference", json={"input": "hello"}) as response:
                return response.status, (await response.json())["error"]["code"]

        async def stopping() -> bool:
            async with http.get(f"{url}/readyz") as response:
                return response.status == 503

        first = asyncio.create_task(infer())
        await eventually(queued, "a request is queued")
        os.kill(os.getpid(), signal.SIGTERM)
        await eventually(stopping, "the gateway is not ready", 1.0)
        os.kill(os.getpid(), signal.SIGTERM)
        async with asyncio.timeout(5):
            assert await first == (503, "draining")
            await process


async def test_a_drain_ends_what_is_not_completed(client: Redis, redis_url: str) -> None:
    """A request that exceeds the drain time gets 503 and ends in Redis. Idle connections and unfinished bodies are not
    waited for: the former are closed, the latter get 503.
    """
    async with running_stack(client, redis_url, worker=False, drain_timeout_s=2.0) as stack:
        queued = asyncio.create_task(stack.infer())
        await accepted(stack)
        idle, idle_writer = await asyncio.open_connection("127.0.0.1", stack.gateway.port)
        idle_writer.write(b"GET /livez HTTP/1.1\r\nHost: a\r\n\r\n")
        assert b"200 OK" in await idle.readuntil(b"\r\n\r\n")
        reader, writer = await asyncio.open_connection("127.0.0.1", stack.gateway.port)
        writer.write(request_bytes(stack, b"Expect: 100-continue", body=b"", length=17))
        assert b" 100 " in await reader.readuntil(b"\r\n\r\n")
        drain = asyncio.create_task(stack.gateway.drain())
        async with asyncio.timeout(1.5):
            assert (await idle.read()).endswith(b'{"status":"ok"}')
            status, headers, document = head_of(await reader.read())
        assert (status, document["error"]["code"], headers["connection"]) == (503, "draining", "close")
        status, document, _ = await queued
        await drain
        assert (status, document["error"]["code"]) == (503, "draining")
        assert await client.hget(Keys().request(document["error"]["request_id"]), "code") == b"draining"
        for each in (idle_writer, writer):
            each.close()


async def ended(pool: Pool, ids: list[str]) -> dict[str, str]:
    """Wait until the audit has a begin and an end of each request; return the codes of the ends ("": completed)."""

    async def whole() -> dict[str, str]:
        records, ends = await pool.audit()
        codes = {end.id: end.error_code for end in ends}
        begun = {record.id for record in records}
        return {i: codes[i] for i in ids} if all(i in codes and i in begun for i in ids) else {}

    return await eventually(whole, f"{len(ids)} whole audit rows", 5.0)


async def flush(client: Redis) -> None:
    """Empty Redis."""
    await client.flushall()


async def fail_over(client: Redis) -> None:
    """Lose all writes but the epoch, and break the subscriptions, as a failover to an old replica does."""
    await client.eval(ALL_BUT_THE_EPOCH, 0)
    await client.execute_command("CLIENT", "KILL", "TYPE", "pubsub")


@pytest.mark.parametrize("lose", [flush, fail_over])
async def test_queued_requests_survive_the_loss_of_redis(
    pool: Pool, client: Redis, redis_url: str, lose: Callable[[Redis], Any]
) -> None:
    """Requests that were queued are submitted again, each in its tier, run once, and have one audit row. A disconnected
    client's request, whose end was lost, has its row too.
    """
    async with running_stack(client, redis_url, worker=False) as stack:
        gone = asyncio.create_task(stack.infer())
        await accepted(stack)
        (cancelled,) = stack.gateway.pending_requests.all()
        gone.cancel()
        await eventually(
            lambda: not len(stack.gateway.pending_requests) and not len(stack.gateway.cancellations), "it is cancelled"
        )
        tasks = [asyncio.create_task(stack.infer({"input": f"i{n}"}, TIERS[n % 3])) for n in range(30)]
        await accepted(stack, 30)
        await lose(client)
        await stack.worker.heartbeat()
        await eventually(lambda: stack.gateway.recovery.submitted_again == 30, "all are submitted again", 3.0)
        assert [await client.llen(Keys().queue(name)) for name in TIERS] == [10, 10, 10]
        await stack.worker.turn()
        responses = await asyncio.gather(*tasks)

        assert [document["output"] for _, document, _ in responses] == [f"i{n}"[::-1] for n in range(30)]
        ids = [document["request_id"] for _, document, _ in responses]
        assert sorted(stack.worker.seen) == sorted(ids)
        assert await ended(pool, [*ids, cancelled.id]) == dict.fromkeys(ids, "") | {cancelled.id: "cancelled"}


async def test_the_end_of_a_replayed_response_outlives_its_gateway(pool: Pool, client: Redis, redis_url: str) -> None:
    """When Redis loses the end of a request whose gateway is gone, the gateway that replayed its response sends it."""
    responses = []
    for gateway_id in ("g1", "g2"):
        async with running_stack(client, redis_url, gateway_id=gateway_id) as stack:
            status, document, headers = await stack.infer({"input": "hello"}, **{"Idempotency-Key": "order-77"})
            request_id = document["request_id"]
            responses.append((status, request_id, headers.get("idempotent-replayed")))
            if gateway_id == "g2":
                await client.flushall()
                assert await ended(pool, [request_id]) == {request_id: ""}
    assert responses == [(200, request_id, None), (200, request_id, "true")]


async def test_backpressure_before_redis_is_full(client: Redis, redis_url: str) -> None:
    """From 80 % of Redis's memory limit until under 75 % requests get 429 without a call, and health has the reason."""
    async with running_stack(client, redis_url) as stack:
        limits = stack.gateway.limits
        note, limits.memory = limits.memory, lambda share: None  # Heartbeats do not change it.
        for share, full in ((0.79, False), (0.8, True), (0.76, True), (0.74, False), (0.9, True)):
            note(share)
            assert limits.short_of_memory == full
        before = stack.gateway.admission.calls
        status, document, headers = await stack.infer()
        assert (status, document["error"]["code"], "retry-after" in headers) == (429, "backpressure", True)
        assert stack.gateway.admission.calls == before

        async def degraded() -> bool:
            _, health = await stack.internal("/internal/health")
            reason = health["checks"]["redis:memory"][0].get("code") == "redis_full"
            return bool(health["status"] == "degraded" and reason)

        await eventually(degraded, "health has the reason", 3.0)
        note(0.5)
        assert (await stack.infer())[0] == 200
