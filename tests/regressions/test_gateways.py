"""Bugs at the edge: answers that contradict the result, health that takes everything away, buffers that only forget."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis
from redis.crc import key_slot

from eventually import eventually
from gateway.direct.spool import MAX_LINE_BYTES, Spool, SpoolError
from gateway.direct.spool_tasks import SpoolMerge
from gateway.inference.deadlines import MAX_IDS, Cancellations
from integration.audit_fixtures import accepted, ended, new_ids
from integration.gateway_fixtures import Stack, running_stack
from pool import Pool, done
from regressions.bad_line import BadLine
from scheduler.errors import ErrorCode
from scheduler.protocol.admission import Adoption
from scheduler.redis_client.keys import Keys
from scheduler.tasks import end_all

OF_ALL_POOLS = (b"rl:customer:customer", b"rl:leases:customer", b"protocol")


async def admitted(stack: Stack, count: int = 1) -> None:
    pending_requests = stack.gateway.pending_requests
    await eventually(
        lambda: sum(w.verdict is not None for w in pending_requests.all()) == count, f"{count} are admitted"
    )


async def test_bug_32_keys_of_one_script_in_several_slots(client: Redis) -> None:
    """Without a tag a cluster refuses a script as CROSSSLOT; here all keys of a pool, and its channels, are in one slot.

    Limits of a customer and the protocol's version are no pool's: they hold across all of them.
    """
    keys = Keys("eu-1")
    pool = Pool(client, keys)
    await pool.gateway_lives("g1")
    await pool.worker_beats("w1")
    await pool.presence.census()
    lost = await pool.running(2)
    await pool.expire_leases()
    await pool.terminations.reap(0)
    again = await pool.running(1)
    await pool.batches.finish(again.batch_id, again.token, [done(again.requests[0].id)])
    await pool.outbox.take(1)
    await pool.queue(1, "paid")

    found = [key async for key in client.scan_iter() if key not in OF_ALL_POOLS] + [keys.responses("g1").encode()]

    assert {key_slot(key) for key in found} == {key_slot(b"eu-1")}
    assert len(found) >= 12
    assert lost.requests


async def test_bug_41_one_dependency_fails_every_health_check(client: Redis, line: BadLine) -> None:
    """A check that asks what all share takes every gateway away at once (AWS); here liveness and readiness ask nobody."""
    async with running_stack(client, line.url, worker=False) as stack:
        line.refuse = True
        line.cut()
        await eventually(lambda: stack.gateway.heartbeat.redis_problem, "the loss is noticed")
        stack.catalog.fresh = False
        stack.catalog.problem = "PostgreSQL does not answer."

        for page in ("/livez", "/readyz"):
            async with stack.http.get(stack.url + page) as answer:
                assert answer.status == 200
        _, document = await stack.internal("/internal/health")

        assert document["status"] != "healthy"
        line.refuse = False


async def test_bug_42_a_fallback_buffer_that_only_the_next_push_drains(pool: Pool, line: BadLine) -> None:
    """A buffer for bad times was emptied by the next arrival, or never (Sidekiq #5909); here it is bounded and empties itself."""
    (request_id,) = await pool.queue(1)
    cancellations = Cancellations(pool.terminations)
    for number in range(MAX_IDS + 5):
        cancellations.add(f"req_{number}", ErrorCode.CANCELLED)
    assert (len(cancellations), cancellations.dropped) == (MAX_IDS, 5)

    async with running_stack(pool.client, line.url, worker=False) as stack:
        line.refuse = True
        line.cut()
        stack.gateway.cancellations.add(request_id, ErrorCode.CANCELLED)
        await eventually(lambda: line.accepted > 5, "it is tried")
        assert len(stack.gateway.cancellations) == 1
        line.refuse = False

        await eventually(lambda: len(stack.gateway.cancellations) == 0, "nobody added anything, and it is empty")
    assert await pool.states([request_id]) == ["failed"]


async def test_bug_42_a_spool_that_is_full_says_so(pool: Pool, tmp_path: Path) -> None:
    """What an outage left on disk is bounded, refuses loudly, and comes back by itself when Redis does."""
    spool = Spool(tmp_path, "gw-1", max_bytes=4 * MAX_LINE_BYTES)
    spool.open()
    ids = new_ids(2000)
    with pytest.raises(SpoolError, match="full"):
        spool.append([(accepted(i), ended(i)) for i in ids])
    spool.append([(accepted(i), ended(i)) for i in ids[:50]])
    away = True
    with ThreadPoolExecutor(1) as thread:
        adoption = Adoption(pool.client, pool.keys)
        merge = SpoolMerge(spool, thread, adoption, redis_available=lambda: not away, remember=lambda pairs: None)
        task = asyncio.create_task(merge.run())
        away = False
        await eventually(lambda: merge.merged == 50, "it is merged")
        await eventually(lambda: spool.bytes == 0, "its file is gone")
        await end_all([task])
    spool.close()

    begun, over = await pool.audit()
    assert [record.id for record in begun] == [record.id for record in over] == ids[:50]


async def test_bug_46_an_idempotency_key_that_is_not_scoped(client: Redis, redis_url: str) -> None:
    """One customer's key replayed another customer's answer; here each has its own, and the same one is replayed."""
    async with running_stack(client, redis_url) as stack:
        sent: dict[str, str] = {"Idempotency-Key": "order-1"}
        first = await stack.infer({"input": "mine"}, "paid", **sent)
        other = await stack.infer({"input": "yours"}, "free", **sent)
        again = await stack.infer({"input": "mine"}, "paid", **sent)
        reused = await stack.infer({"input": "another"}, "paid", **sent)

    assert [answer[0] for answer in (first, other, again, reused)] == [200, 200, 200, 422]
    assert (first[1]["output"], other[1]["output"], again[1]["output"]) == ("enim", "sruoy", "enim")
    assert again[1]["request_id"] == first[1]["request_id"] != other[1]["request_id"]
    assert (again[2]["idempotent-replayed"], first[2].get("idempotent-replayed")) == ("true", None)


async def test_bug_47_a_timeout_while_the_result_is_there(client: Redis, redis_url: str) -> None:
    """The client was told 504 though its result lay there; here the deadline is a last look, and what stands is answered."""
    async with running_stack(client, redis_url, worker=False, total_ms=400) as stack:
        stack.gateway.subscriber.deliver = lambda message: None  # type: ignore[method-assign]  # The message is lost.
        asking: asyncio.Task[tuple[int, Any, Any]] = asyncio.create_task(stack.infer())
        await admitted(stack)
        await stack.worker.turn()

        status, document, _ = await asking

    assert (status, document["output"]) == (200, "olleh")
    assert document["metadata"]["latency_ms"] >= 300  # It really waited for its deadline, or nearly so.
