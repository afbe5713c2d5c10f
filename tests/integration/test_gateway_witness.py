"""Redis loses what it held, under load: every accepted request is answered all the same, and has one audit row."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from eventually import eventually
from integration.gateway_fixtures import TIERS, Stack, running_stack
from ledger.audit.rows import Folded
from scheduler.errors import RedisUnavailable
from scheduler.protocol.audit_outbox import Record, decode_entry
from scheduler.redis_client.connections import command_client
from scheduler.redis_client.keys import Keys
from scheduler.tasks import end_all
from tierlane.embedded.redis import EmbeddedRedis

RUN_S = 0.05


class Auditor:
    """Takes what the outbox holds, as the ledger does, and keeps it when Redis loses everything."""

    def __init__(self, client: Redis) -> None:
        self._client = client
        self.records: list[Record] = []

    async def run(self) -> None:
        while True:
            await self.take()
            await asyncio.sleep(0.1)

    async def take(self) -> None:
        """Take all that is there now."""
        try:
            while entry := await self._client.rpop(Keys().outbox):
                self.records += decode_entry(entry)[0]  # type: ignore[arg-type]
        except (RedisUnavailable, OSError):
            return

    def rows(self) -> Folded:
        """What is known of each request, as the ledger folds it."""
        return Folded(self.records)

    async def ended(self, ids: list[str]) -> dict[str, str]:
        """The code each request ended with ("": completed), once all have a beginning and an end."""

        async def whole() -> dict[str, str]:
            await self.take()
            rows = self.rows()
            found = {i: rows.ended[i].error_code for i in ids if i in rows.accepted and i in rows.ended}
            return found if len(found) == len(ids) else {}

        return await eventually(whole, f"{len(ids)} whole audit rows", 5.0)


@asynccontextmanager
async def working(stack: Stack) -> AsyncIterator[Auditor]:
    """A worker that needs 50 ms a batch, and an auditor, both of which outlive whatever happens to Redis."""
    auditor = Auditor(stack.redis)
    tasks = [asyncio.create_task(run_slowly(stack)), asyncio.create_task(auditor.run())]
    try:
        yield auditor
    finally:
        await end_all(tasks)


async def run_slowly(stack: Stack) -> None:
    """Form, claim, run and finish, again and again; a Redis that is away or has forgotten the batch is no reason to end."""
    worker = stack.worker
    count = 0
    while True:
        count += 1
        try:
            await worker.heartbeat()
            await worker.batches.form(f"slow-{count}", [(name, 32) for name in TIERS], 1, TIERS)
            popped: Any = await stack.redis.lpop(Keys().batch_queue)
            claimed = await worker.batches.claim(popped.decode(), "worker-1", f"token-{count}") if popped else None
            if claimed is not None and claimed.requests:
                worker.seen += [member.id for member in claimed.requests]
                await asyncio.sleep(RUN_S)
                outcomes = [worker.answerer(member) for member in claimed.requests]
                await worker.batches.finish(claimed.batch_id, claimed.token, outcomes)
        except (RedisUnavailable, OSError):
            await asyncio.sleep(0.05)
        await asyncio.sleep(0.01)


Told = tuple[int, dict[str, Any], str]


async def load(stack: Stack, rate: float, seconds: float) -> list[Told]:
    """An open loop over all tiers: (status, document, secret) of each, in the order of sending."""

    async def ask(index: int) -> Told:
        secret = f"secret-{index}"
        status, document, _ = await stack.infer({"input": secret}, TIERS[index % 3])
        return status, document, secret

    loop = asyncio.get_running_loop()
    began = loop.time()
    asked = []
    for index in range(int(rate * seconds)):
        await asyncio.sleep(max(0.0, began + index / rate - loop.time()))
        asked.append(asyncio.create_task(ask(index)))
    return list(await asyncio.gather(*asked))


async def all_completed(auditor: Auditor, told: list[Told]) -> None:
    """Everybody got the own output, and each has one row that says so."""
    assert [(status, document.get("output")) for status, document, _ in told] == [
        (200, secret[::-1]) for _, _, secret in told
    ]
    ids = [document["request_id"] for _, document, _ in told]
    assert await auditor.ended(ids) == dict.fromkeys(ids, "")
    assert set(auditor.rows().accepted) == set(ids)


async def test_flushall_under_load_loses_nobody(client: Redis, redis_url: str) -> None:
    """Everything is gone four times, while requests wait, run and end: all are answered 200, one audit row each."""
    async with running_stack(client, redis_url, worker=False) as stack, working(stack) as auditor:
        asking = asyncio.create_task(load(stack, 150, 3.0))
        for _ in range(4):
            await asyncio.sleep(0.6)
            await client.flushall()
        await all_completed(auditor, await asking)
        assert stack.gateway.recovery.submitted_again > 0
        assert stack.gateway.recovery.sent_again > 0
        assert stack.gateway.recovery.recoveries <= 5


async def test_what_waits_in_the_queue_survives_flushall(client: Redis, redis_url: str) -> None:
    """Nobody works while Redis is emptied, so all of it waits: submitted again, enterprise first, and answered."""
    async with running_stack(client, redis_url, worker=False) as stack:
        asking = [asyncio.create_task(stack.infer({"input": f"i{n}"}, TIERS[n % 3])) for n in range(30)]
        await eventually(lambda: _accepted(stack) == 30, "all are accepted")
        await client.flushall()
        await stack.worker.heartbeat()
        await eventually(lambda: stack.gateway.recovery.submitted_again == 30, "all are submitted again", 2.0)
        assert [await client.llen(Keys().queue(name)) for name in TIERS] == [10, 10, 10]
        async with working(stack) as auditor:
            answers = await asyncio.gather(*asking)
            assert [status for status, _, _ in answers] == [200] * 30
            ids = [document["request_id"] for _, document, _ in answers]
            assert await auditor.ended(ids) == dict.fromkeys(ids, "")


def _accepted(stack: Stack) -> int:
    return sum(waiting.accepted for waiting in stack.gateway.pending_requests.all())


ALL_BUT_THE_EPOCH = "for _, k in ipairs(redis.call('KEYS', '*')) do if k ~= 'epoch' then redis.call('DEL', k) end end"


async def test_a_failover_that_lost_the_last_writes(client: Redis, redis_url: str) -> None:
    """The same epoch, but requests and records are gone and connections broke: the new subscription is the sign."""
    async with running_stack(client, redis_url, worker=False) as stack, working(stack) as auditor:
        asking = asyncio.create_task(load(stack, 150, 2.0))
        await asyncio.sleep(1.0)
        await client.eval(ALL_BUT_THE_EPOCH, 0)
        await client.execute_command("CLIENT", "KILL", "TYPE", "pubsub")
        await all_completed(auditor, await asking)
        assert stack.gateway.recovery.submitted_again > 0


async def test_redis_killed_and_back_empty(tmp_path: Path) -> None:
    """SIGKILL without persistence, back within a second: who waited then is answered 200 with one row, nobody else lost."""
    server = EmbeddedRedis(tmp_path, tmp_path / "s", ephemeral=True)
    await server.start()
    client = command_client(server.url)
    try:
        async with running_stack(client, server.url, worker=False) as stack:
            asking = [asyncio.create_task(stack.infer({"input": f"i{n}"})) for n in range(20)]
            await eventually(lambda: _accepted(stack) == 20, "all are accepted")
            os.kill(server.pid, signal.SIGKILL)
            await eventually(lambda: stack.gateway.heartbeat.redis_problem, "the gateway misses Redis")
            server.kill()
            await server.start()
            async with working(stack) as auditor:
                answers = await asyncio.gather(*asking)
                assert [status for status, _, _ in answers] == [200] * 20
                ids = [document["request_id"] for _, document, _ in answers]
                assert await auditor.ended(ids) == dict.fromkeys(ids, "")
    finally:
        await client.aclose()
        await server.stop()


async def test_a_hang_submits_again_and_runs_nobody_twice(client: Redis, redis_url: str, redis_server: Any) -> None:
    """Redis stood still and lost nothing: what is submitted again is known there, and runs once."""
    async with running_stack(client, redis_url, worker=False) as stack:
        asking = [asyncio.create_task(stack.infer({"input": f"i{n}"})) for n in range(5)]
        await eventually(lambda: _accepted(stack) == 5, "all are accepted")
        os.kill(redis_server.pid, signal.SIGSTOP)
        try:
            await eventually(lambda: stack.gateway.heartbeat.redis_problem, "the gateway misses Redis")
        finally:
            os.kill(redis_server.pid, signal.SIGCONT)
        await eventually(lambda: stack.gateway.recovery.submitted_again == 5, "all are submitted again", 3.0)
        assert await client.llen(Keys().queue("free")) == 5
        async with working(stack) as auditor:
            assert [status for status, _, _ in await asyncio.gather(*asking)] == [200] * 5
            assert len(stack.worker.seen) == len(set(stack.worker.seen)) == 5
            await auditor.ended(list(stack.worker.seen))


async def test_too_late_to_run_again_still_has_its_row(client: Redis, redis_url: str) -> None:
    """Emptied with less than a run's time left: 504 at the deadline, and the audit hears of both ends."""
    async with running_stack(client, redis_url, worker=False, total_ms=900) as stack:
        stack.gateway.recovery._p95_ms = lambda: 5000.0
        asking = asyncio.create_task(stack.infer())
        await eventually(lambda: _accepted(stack) == 1, "it is accepted")
        await client.flushall()
        status, document, _ = await asking
        assert (status, document["error"]["code"]) == (504, "deadline_exceeded")
        assert stack.gateway.recovery.submitted_again == 0
        request_id = document["error"]["request_id"]
        assert await Auditor(client).ended([request_id]) == {request_id: "deadline_exceeded"}


async def test_a_client_that_left_before_the_loss_has_its_row(client: Redis, redis_url: str) -> None:
    """Its end was written, lost with everything, and is told again."""
    async with running_stack(client, redis_url, worker=False) as stack:
        asking = asyncio.create_task(stack.infer())
        await eventually(lambda: _accepted(stack) == 1, "it is accepted")
        (waiting,) = stack.gateway.pending_requests.all()
        asking.cancel()
        await eventually(
            lambda: not len(stack.gateway.pending_requests) and not len(stack.gateway.cancellations), "it is cancelled"
        )
        await client.flushall()
        assert await Auditor(client).ended([waiting.id]) == {waiting.id: "cancelled"}


async def test_the_end_of_a_replayed_answer_survives_its_gateway(client: Redis, redis_url: str) -> None:
    """Its gateway is gone and Redis loses the end before it was audited: the gateway that replayed the answer tells it."""
    key, told = {"Idempotency-Key": "order-77"}, []
    for gateway_id in ("g1", "g2"):
        async with running_stack(client, redis_url, gateway_id=gateway_id) as stack:
            status, document, headers = await stack.infer({"input": "hello"}, **key)
            told.append((status, document["request_id"], headers.get("idempotent-replayed")))
            if gateway_id == "g2":
                await client.flushall()
                request_id = document["request_id"]
                assert await Auditor(client).ended([request_id]) == {request_id: ""}
    assert told == [(200, request_id, None), (200, request_id, "true")]


@pytest.fixture
async def memory_limit(client: Redis) -> AsyncIterator[Any]:
    """Sets the limit so that Redis uses a given part of it; as before after the test."""
    before = await client.config_get("maxmemory")
    # Beside it the buffers of connections, which come and go, are nothing.
    await client.setrange("filler", 32 << 20, b"x")

    async def use(share: float) -> None:
        used = (await client.info("memory"))["used_memory"]
        await client.config_set("maxmemory", int(used / share))

    yield use
    await client.config_set("maxmemory", before["maxmemory"])
    await client.delete("filler")


async def test_backpressure_before_redis_is_full(client: Redis, redis_url: str, memory_limit: Any) -> None:
    """At 80 % new requests get 429 without a call, health says why; under 75 % they are served again."""
    async with running_stack(client, redis_url) as stack:
        await memory_limit(0.9)
        await eventually(lambda: stack.gateway.limits.short_of_memory, "the limit is seen", 2.0)
        before = stack.gateway.admission.calls
        status, document, headers = await stack.infer()
        assert (status, document["error"]["code"]) == (429, "backpressure")
        assert "retry-after" in headers
        assert stack.gateway.admission.calls == before

        async def told() -> bool:
            _, health = await stack.internal("/internal/health")
            said = any("of its memory limit" in reason for reason in health["reasons"])
            return bool(health["status"] == "degraded" and said)

        await eventually(told, "health is judged anew and says why", 2.0)
        await memory_limit(0.77)
        await eventually(lambda: 0.75 < stack.gateway.limits.memory_share < 0.8, "the new limit is seen", 2.0)
        assert stack.gateway.limits.short_of_memory
        await memory_limit(0.5)
        await eventually(lambda: not stack.gateway.limits.short_of_memory, "it eases", 2.0)
        assert (await stack.infer())[0] == 200
