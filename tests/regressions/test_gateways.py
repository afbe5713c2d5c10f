"""Bugs of gateways: responses that contradict the result, health checks that remove all gateways, fallback buffers."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis
from redis.crc import key_slot

from eventually import eventually
from gateway.direct.spool import MAX_LINE_BYTES, Spool, SpoolError
from gateway.direct.spool_merge import SpoolMerge
from gateway.inference.deadlines import MAX_IDS, Cancellations
from integration.audit_fixtures import accepted, ended, new_ids
from integration.gateway_fixtures import running_stack
from pool import Pool, done
from regressions.bad_line import BadLine
from scheduler.errors import ErrorCode
from scheduler.protocol.adoption import Adoption
from scheduler.redis_client.keys import DEFAULT_CELL, Keys, hash_tag
from scheduler.tasks import end_all


async def test_bug_32_keys_of_one_script_in_several_slots(client: Redis) -> None:
    """A cluster rejects such a script (CROSSSLOT). Here all keys and channels have one hash tag on a cluster."""
    keys = Keys.at("redis+cluster://", "eu-1")
    pool = Pool(client, keys)
    await pool.gateway_lives("g1")
    await pool.worker_beats("w1")
    await pool.presence.census()
    await pool.running(2)
    await pool.expire_leases()
    await pool.terminations.reap(0)
    again = await pool.running(1)
    await pool.batches.finish(again.batch_id, again.token, [done(again.requests[0].id)])
    await pool.outbox.take(1)
    await pool.queue(1, "paid")

    found = [key async for key in client.scan_iter()] + [keys.responses("g1").encode()]

    assert {key_slot(key) for key in found} == {key_slot(hash_tag(DEFAULT_CELL).encode())}
    assert len(found) >= 12


async def test_bug_41_one_dependency_fails_every_health_check(client: Redis, line: BadLine) -> None:
    """A probe of a shared dependency removes all gateways at once (AWS). Here liveness and readiness use no dependency."""
    async with running_stack(client, line.url, worker=False) as stack:
        line.refuse = True
        line.cut()
        await eventually(lambda: stack.gateway.heartbeat.redis_problem, "the loss is detected")
        stack.catalog.fresh = False
        stack.catalog.problem = "PostgreSQL does not answer."

        for path in ("/livez", "/readyz"):
            async with stack.http.get(stack.url + path) as response:
                assert response.status == 200
        _, document = await stack.internal("/internal/health")

        assert document["status"] != "healthy"
        line.refuse = False


async def test_bug_42_a_fallback_buffer_is_drained_only_by_the_next_item(pool: Pool, line: BadLine) -> None:
    """Or never (Sidekiq #5909). Here cancellations are bounded, and are sent as soon as Redis is available again."""
    (request_id,) = await pool.queue(1)
    cancellations = Cancellations(pool.terminations)
    for number in range(MAX_IDS + 5):
        cancellations.add(f"req_{number}", ErrorCode.CANCELLED)
    assert (len(cancellations), cancellations.dropped) == (MAX_IDS, 5)

    async with running_stack(pool.client, line.url, worker=False) as stack:
        line.refuse = True
        line.cut()
        stack.gateway.cancellations.add(request_id, ErrorCode.CANCELLED)
        await eventually(lambda: line.accepted > 5, "several attempts")
        assert len(stack.gateway.cancellations) == 1
        line.refuse = False

        await eventually(lambda: len(stack.gateway.cancellations) == 0, "the cancellation is sent")
    assert await pool.states([request_id]) == ["failed"]


async def test_bug_42_a_full_spool_reports_it(pool: Pool, tmp_path: Path) -> None:
    """The spool of an outage is bounded, raises when it is full, and is merged when Redis is available again."""
    spool = Spool(tmp_path, "gw-1", max_bytes=4 * MAX_LINE_BYTES)
    spool.open()
    ids = new_ids(2000)
    with pytest.raises(SpoolError, match="full"):
        spool.append([(accepted(i), ended(i)) for i in ids])
    spool.append([(accepted(i), ended(i)) for i in ids[:50]])
    is_available = False
    with ThreadPoolExecutor(1) as thread:
        adoption = Adoption(pool.client, pool.keys)
        merge = SpoolMerge(spool, thread, adoption, redis_available=lambda: is_available, remember=lambda pairs: None)
        task = asyncio.create_task(merge.run())
        is_available = True
        await eventually(lambda: merge.merged == 50, "the spool is merged")
        await eventually(lambda: spool.bytes == 0, "its file is deleted")
        await end_all([task])
    spool.close()

    begun, over = await pool.audit()
    assert [record.id for record in begun] == [record.id for record in over] == ids[:50]


async def test_bug_47_a_timeout_although_the_result_is_stored(client: Redis, redis_url: str) -> None:
    """Here the gateway reads the stored reply before it sends a timeout."""
    async with running_stack(client, redis_url, worker=False, total_ms=400) as stack:
        stack.gateway.subscriber.deliver = lambda message: None  # messages are lost
        response: asyncio.Task[tuple[int, Any, Any]] = asyncio.create_task(stack.infer())
        pending = stack.gateway.pending_requests
        await eventually(lambda: any(each.verdict is not None for each in pending.all()), "the request is admitted")
        await stack.worker.turn()

        status, document, _ = await response

    assert (status, document["output"]) == (200, "olleh")
    assert document["metadata"]["latency_ms"] >= 300  # at the deadline
