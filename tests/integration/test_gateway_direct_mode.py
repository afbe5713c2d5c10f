"""Direct mode: while Redis is stopped, the gateway calls the workers directly, and records all requests in its spool."""

import asyncio
import time
from typing import Any

import pytest

from direct_parts import FakeEndpoint, reverse
from eventually import eventually
from gateway.direct.spool import SpoolError, from_line
from integration.direct_mode_fixtures import Direct, direct, redis_used
from integration.gateway_fixtures import accepted, served
from scheduler.protocol.batches import Outcome
from scheduler.protocol.direct import DirectItem
from scheduler.redis_client.keys import Keys

__all__ = ["direct"]


async def test_requests_are_served_within_a_second(direct: Direct) -> None:
    """The first request after Redis stopped and later ones are served, and each has one audit row with mode direct."""
    async with direct.stack("serve") as (stack, (worker,)):
        stopped = direct.stop_redis()
        status, first, headers = await stack.infer({"input": "abc"}, "enterprise")
        assert time.monotonic() - stopped < 1.0
        began = time.monotonic()
        later = [await stack.infer({"input": f"text {n}"}, "enterprise") for n in range(5)]
        assert time.monotonic() - began < 0.5
        assert (status, first["output"]) == (200, "cba")
        assert [(code, each["output"]) for code, each, _ in later] == [(200, f"text {n}"[::-1]) for n in range(5)]
        metadata = first["metadata"]
        assert (metadata["tier"], metadata["attempts"], metadata["gpu_ms"]) == ("enterprise", 1, 2.5)
        assert (worker.hellos[0].gateway_id, headers["x-ratelimit-limit-requests"]) == ("g1", "1000")
        direct.resume_redis()
        await redis_used(stack)

        for document in (first, *(each for _, each, _ in later)):
            records, ended = await direct.records(document["request_id"])
            ends = {(e.state, e.mode, e.worker_id, e.batch_size) for e in ended if e.delivered}
            assert records[0].customer_id == "customer-enterprise"
            assert ends == {("completed", "direct", "worker-1", 1)}
        assert list(direct.spool.glob("*.log*")) == []


async def test_pending_requests_are_taken_over(direct: Direct) -> None:
    """Requests that Redis accepted before it stopped are served by tier; their results are written to Redis later."""
    tiers = ("free", "paid", "enterprise")
    async with direct.stack("serve") as (stack, (worker,)):
        tasks = [asyncio.create_task(stack.infer({"input": name}, name)) for name in tiers]
        await accepted(stack, 3)
        stopped = direct.stop_redis()
        responses = await asyncio.gather(*tasks)

        assert time.monotonic() - stopped < 1.5
        assert [(code, each["output"]) for code, each, _ in responses] == [(200, name[::-1]) for name in tiers]
        assert worker.batches == [[each["request_id"] for _, each, _ in reversed(responses)]]
        direct.resume_redis()
        await redis_used(stack)
        for _, document, _ in responses:
            row = Keys().request(document["request_id"])
            assert await direct.pool.client.hget(row, "state") == b"completed"
            assert await direct.ends(document["request_id"]) == {("completed", "", "direct", True)}


@pytest.mark.parametrize("enabled", [True, False])
async def test_without_direct_endpoints_requests_fail_fast(direct: Direct, enabled: bool) -> None:
    """Without endpoints or with direct mode off, requests get 503 at once until Redis responds. Nothing is spooled."""
    async with direct.stack(*(() if enabled else ("serve",)), direct=enabled) as (stack, workers):
        direct.stop_redis()
        await stack.infer()
        began = time.monotonic()
        status, document, headers = await stack.infer()
        assert (status, document["error"]["code"]) == (503, "no_capacity")
        assert not enabled or time.monotonic() - began < 0.1
        assert {"retry-after", "ratelimit"} <= headers.keys()
        assert [worker.hellos for worker in workers] == [[]] * len(workers)
        if enabled:
            _, health = await stack.internal("/internal/health")
            assert health["checks"]["breaker:redis"][0]["observedValue"] != "closed"
        else:
            assert not direct.spool.exists()
        direct.resume_redis()
        await eventually(lambda: not stack.gateway.direct.active, "requests go through Redis again", 2.0)


@pytest.mark.parametrize("fault", ["busy", "slow", "hang up", "unfriendly", "nonsense", "another", "silent"])
async def test_requests_move_to_another_worker(direct: Direct, fault: str) -> None:
    """When a worker is busy, has a model that is too slow, disconnects, rejects the hello, sends nonsense or another batch's results, or is silent, all
    requests are served by the other worker in time, one at a time after a loss.
    """
    async with direct.stack(fault, "serve") as (stack, workers):
        direct.stop_redis()
        responses = await asyncio.gather(*(stack.infer({"input": f"n{n}"}, "paid") for n in range(20)))

        assert [(code, each["output"]) for code, each, _ in responses] == [(200, f"n{n}"[::-1]) for n in range(20)]
        assert workers[0].hellos
        assert max(each["metadata"]["latency_ms"] for _, each, _ in responses) < 3000
        second = [each["metadata"] for _, each, _ in responses if each["metadata"]["attempts"] == 2]
        assert fault != "silent" or {metadata["batch_size"] for metadata in second} == {1}


async def test_models_that_are_too_slow_fail_requests_at_once(direct: Direct) -> None:
    """When the models of all workers are too slow, no request waits for its deadline."""
    async with direct.stack("slow", "slow") as (stack, _):
        direct.stop_redis()
        responses = [await stack.infer({"input": "abc"}) for _ in range(3)]

        assert {document["error"]["code"] for _, document, _ in responses} == {"model_too_slow"}
        assert [status for status, _, _ in responses] == [503] * 3


def timed_out(item: DirectItem) -> Outcome:
    return Outcome(item.id, "gpu_timeout", -1.0, 0, "", "")


async def test_a_hung_model_costs_an_attempt(direct: Direct) -> None:
    """A request that ends with `gpu_timeout` while time is left is run again, three times at most."""
    async with direct.stack("serve", active=True) as (stack, (worker,)):
        hangs = [2]

        def serve(item: DirectItem) -> Outcome:
            hangs[0] -= 1
            return timed_out(item) if hangs[0] >= 0 else reverse(item)

        worker.serve = serve
        status, document, _ = await stack.infer({"input": "abc"})
        assert (status, document["output"], document["metadata"]["attempts"]) == (200, "cba", 3)

        worker.serve = timed_out
        before = len(worker.batches)
        status, document, _ = await stack.infer({"input": "abc"})
        assert (status, document["error"]["code"]) == (504, "gpu_timeout")
        assert len(worker.batches) - before == 3


async def test_when_all_workers_disconnect(direct: Direct) -> None:
    """A request gets `worker_lost` after three attempts and has one begin and one end in the spool; later ones get 503."""
    async with direct.stack("hang up") as (stack, (worker,)):
        direct.stop_redis()
        status, document, _ = await stack.infer(tier_name="enterprise")
        assert (status, document["error"]["code"]) == (503, "worker_lost")
        assert len(worker.batches) == 3
        lines = [from_line(line) for line in (direct.spool / "g1.log").read_bytes().splitlines(keepends=True)]
        request_id = document["error"]["request_id"]
        assert [line and (line[0].id, line[1] and line[1].error_code) for line in lines] == [
            (request_id, None),
            (request_id, "worker_lost"),
        ]
        status, document, _ = await stack.infer(tier_name="enterprise")
        assert (status, document["error"]["code"]) == (503, "no_capacity")


async def test_idempotency_keys_need_redis(direct: Direct) -> None:
    """A request with a key gets 503 while Redis is stopped, and goes through Redis as soon as it responds. If Redis then
    stops again, the accepted request is taken over.
    """
    key = {"Idempotency-Key": "k"}
    async with direct.stack("serve", active=True) as (stack, _):
        stack.gateway.direct._policy._leave_after_s = 30.0
        status, document, headers = await stack.infer(tier_name="enterprise", **key)
        assert (status, document["error"]["code"], "retry-after" in headers) == (503, "no_capacity", True)
        direct.resume_redis()
        await eventually(lambda: stack.gateway.watch.answers, "Redis responds")
        task = asyncio.create_task(stack.infer(tier_name="enterprise", **key))
        await eventually(lambda: served(stack, task), "it is served through Redis")
        assert ((await task)[0], stack.gateway.direct.active) == (200, True)
        assert (await stack.infer(tier_name="enterprise"))[0] == 200

        task = asyncio.create_task(stack.infer({"input": "abc"}, "paid", **key))
        await accepted(stack)
        direct.stop_redis()
        status, document, _ = await task
        assert (status, document["output"]) == (200, "cba")
        assert document["metadata"]["latency_ms"] < 1500


async def begun(worker: FakeEndpoint) -> str:
    """Wait for the worker's second batch, which follows that of the fixture; return its request's id."""
    await eventually(lambda: len(worker.batches) == 2, "the worker has the request")
    return worker.batches[1][0]


async def test_a_spool_that_fills_up_rejects_before_the_run(direct: Direct) -> None:
    """Each request that ran was answered and is in the audit; each that was rejected did not run."""
    async with direct.stack("serve", spool_max_bytes=72_000) as (stack, (worker,)):
        direct.stop_redis()
        responses = await asyncio.gather(*(stack.infer({"input": f"n{n}"}, "enterprise") for n in range(200)))
        completed = {each["request_id"] for code, each, _ in responses if code == 200}
        rejected = {(code, each["error"]["code"]) for code, each, _ in responses if code != 200}
        assert completed
        assert rejected == {(503, "no_capacity")}
        assert sorted(i for batch in worker.batches for i in batch) == sorted(completed)
        assert stack.gateway.direct.view().spool_bytes <= 72_000
        direct.resume_redis()
        await redis_used(stack)
        records, ended = await direct.pool.audit()

        assert {each.id for each in records} == {each.id for each in ended} == completed


async def test_an_end_that_could_not_be_written_is_written_later(
    direct: Direct, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the disk fails after the run, the client gets 503, and that is in the audit once the disk works again."""
    monkeypatch.setattr("gateway.direct.spool_writer.RETRY_S", 0.1)

    def fail(entries: object, reserve: int) -> None:
        raise SpoolError("The spool cannot be written: Input/output error.")

    async with direct.stack("serve", active=True) as (stack, (worker,)):
        spool = stack.gateway.direct._parts.audit.spool
        worker.seconds = 0.2
        task = asyncio.create_task(stack.infer(tier_name="enterprise"))
        await begun(worker)
        with monkeypatch.context() as patch:
            patch.setattr(spool, "append", fail)
            status, document, _ = await task
        assert (status, document["error"]["code"]) == (503, "no_capacity")
        direct.resume_redis()
        await redis_used(stack)
        completion = stack.gateway.direct._completion
        await eventually(lambda: not completion._unwritten and not spool.reserved, "its end is written")

        assert await direct.ends(document["error"]["request_id"], stack) == {("failed", "no_capacity", "direct", True)}


async def test_a_disconnected_client_is_recorded_as_cancelled(direct: Direct) -> None:
    """The record says that no response was delivered."""
    async with direct.stack("serve", active=True) as (stack, (worker,)):
        worker.behaviour = "silent"
        task = asyncio.create_task(stack.infer(tier_name="paid"))
        request_id = await begun(worker)
        task.cancel()
        await eventually(lambda: len(stack.gateway.direct._completion) == 0, "it is recorded")
        direct.resume_redis()

        assert await direct.ends(request_id, stack) == {("failed", "cancelled", "direct", False)}


def poison(item: DirectItem) -> Outcome:
    completed = reverse(item)
    return completed if completed.output != "dab" else Outcome(item.id, "poison_request", 0.0, 0, "v1", "")


@pytest.mark.parametrize(
    ("worker_state", "changes", "status", "code"),
    [
        ({"serve": poison}, {}, 422, "poison_request"),
        ({"seconds": 5.0}, {"total_ms": 900}, 504, "deadline_exceeded"),
        ({"behaviour": "busy"}, {}, 504, "queue_timeout"),
    ],
)
async def test_errors_are_recorded_as_returned(
    direct: Direct, worker_state: dict[str, Any], changes: dict[str, Any], status: int, code: str
) -> None:
    """A failed run, the deadline and the queue timeout are returned in time, and the audit has the same code."""
    async with direct.stack("serve", active=True, **changes) as (stack, (worker,)):
        stack.catalog.set(key={"max_queue_ms": 300})
        for name, value in worker_state.items():
            setattr(worker, name, value)
        began = time.monotonic()
        returned, document, _ = await stack.infer({"input": "bad"})
        assert (returned, document["error"]["code"]) == (status, code)
        assert time.monotonic() - began < 1.0
        direct.resume_redis()

        assert await direct.ends(document["error"]["request_id"], stack) == {("failed", code, "direct", True)}


async def test_an_accepted_request_waits_for_redis_if_no_worker_serves_it(direct: Direct) -> None:
    """A request that Redis had accepted is left to Redis after three direct attempts, and completed there in time."""
    async with direct.stack("hang up") as (stack, (worker,)):
        task = asyncio.create_task(stack.infer({"input": "abc"}))
        await accepted(stack)
        direct.stop_redis()
        await eventually(lambda: len(worker.batches) == 3, "it was tried three times")
        (pending,) = stack.gateway.pending_requests.all()
        await eventually(lambda: not pending.direct, "it is left to Redis")
        assert not task.done()
        direct.resume_redis()
        await eventually(lambda: served(stack, task), "Redis serves it")
        assert (await task)[1]["output"] == "cba"


async def test_a_drain_in_direct_mode(direct: Direct) -> None:
    """A draining gateway completes what a worker runs and rejects the rest; the next gateway merges its spool."""
    async with direct.stack("serve", active=True, drain_timeout_s=0.5) as (stack, (worker,)):
        worker.seconds = 0.2
        first = asyncio.create_task(stack.infer(tier_name="enterprise"))
        await begun(worker)
        second = asyncio.create_task(stack.infer(tier_name="free"))
        await eventually(lambda: len(stack.gateway.direct._completion) == 2, "the second waits")
        worker.behaviour = "silent"
        await stack.gateway.drain()
        responses = [await first, await second]
    assert len(list(direct.spool.glob("g1.log*"))) == 1
    assert [(status, document.get("error", {}).get("code")) for status, document, _ in responses] == [
        (200, None),
        (503, "draining"),
    ]
    direct.resume_redis()
    async with direct.gateway(gateway_id="g2"):
        await eventually(lambda: not list(direct.spool.glob("g1.*")), "the files are merged")
    assert await direct.ends(responses[0][1]["request_id"]) == {("completed", "", "direct", True)}
    assert await direct.ends(responses[1][1]["error"]["request_id"]) == {("failed", "draining", "direct", True)}
