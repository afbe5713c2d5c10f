"""Redis stands still: requests go to the workers' own doors, enterprise first, and the audit is whole afterwards."""

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from direct_parts import endpoints, reverse
from eventually import eventually
from integration.direct_mode_fixtures import Outage, audit_of, back, direct_already, direct_stack, outage, served
from integration.gateway_fixtures import tier
from pool import Pool
from scheduler.protocol.batches import Outcome
from scheduler.protocol.direct import DirectItem
from scheduler.redis_client.keys import Keys

__all__ = ["outage"]  # pytest finds the fixture by its name here.


async def test_within_a_second_requests_are_answered_past_redis(
    pool: Pool, client: Redis, redis_url: str, outage: Outage, tmp_path: Path
) -> None:
    """The one sent at once and the ones sent later; each is in the audit afterwards, with mode direct, once."""
    async with endpoints("serve") as direct_workers, direct_stack(client, redis_url, tmp_path, direct_workers) as stack:
        stopped = outage.begin()
        status, first, headers = await stack.infer({"input": "abc"}, "enterprise")
        assert time.monotonic() - stopped < 1.0
        began = time.monotonic()
        later = [await stack.infer({"input": f"text {n}"}, "enterprise") for n in range(5)]
        assert time.monotonic() - began < 0.5
        assert (status, first["output"]) == (200, "cba")
        assert [(code, each["output"]) for code, each, _ in later] == [(200, f"text {n}"[::-1]) for n in range(5)]
        metadata = first["metadata"]
        assert (metadata["tier"], metadata["attempts"], metadata["gpu_ms"]) == ("enterprise", 1, 2.5)
        assert (direct_workers[0].hellos[0].gateway_id, headers["x-ratelimit-limit-requests"]) == ("g1", "1000")
        outage.end()
        await back(stack)

        for document in (first, *(each for _, each, _ in later)):
            accepted, ended = await audit_of(pool, document["request_id"])
            told = {(e.state, e.mode, e.worker_id, e.batch_size) for e in ended if e.delivered}
            assert accepted[0].customer_id == "customer-enterprise"
            assert told == {("completed", "direct", "worker-1", 1)}
        assert list((tmp_path / "spool").glob("*.log*")) == []


async def test_those_who_wait_already_are_taken_over(
    pool: Pool, client: Redis, redis_url: str, outage: Outage, tmp_path: Path
) -> None:
    """Accepted by Redis before it stopped: answered by a worker's door, and ended in Redis by what they were told."""
    async with endpoints("serve") as direct_workers, direct_stack(client, redis_url, tmp_path, direct_workers) as stack:
        asking = [asyncio.create_task(stack.infer({"input": name}, name)) for name in ("free", "paid", "enterprise")]
        pending_requests = stack.gateway.pending_requests
        await eventually(lambda: [w.accepted for w in pending_requests.all()] == [True] * 3, "all three are accepted")
        stopped = outage.begin()
        answers = await asyncio.gather(*asking)

        assert time.monotonic() - stopped < 1.5
        assert [(code, each["output"]) for code, each, _ in answers] == [
            (200, "eerf"),
            (200, "diap"),
            (200, "esirpretne"),
        ]
        assert len(direct_workers[0].batches) == 1  # All three were there when it began.
        order = [
            each["metadata"]["tier"]
            for i in direct_workers[0].batches[0]
            for _, each, _ in answers
            if each["request_id"] == i
        ]
        assert order == ["enterprise", "paid", "free"]
        outage.end()
        await back(stack)
        for _, document, _ in answers:
            assert await client.hget(Keys().request(document["request_id"]), "state") == b"completed"
            _, ended = await audit_of(pool, document["request_id"])
            assert {(each.state, each.mode, each.delivered) for each in ended} == {("completed", "direct", True)}


async def test_without_a_door_it_fails_fast(client: Redis, redis_url: str, outage: Outage, tmp_path: Path) -> None:
    """503 at once while Redis is away, and Redis is used again as soon as it answers."""
    async with direct_stack(client, redis_url, tmp_path, []) as stack:
        outage.begin()
        await stack.infer()
        began = time.monotonic()
        status, document, headers = await stack.infer()
        assert (status, document["error"]["code"]) == (503, "no_capacity")
        assert time.monotonic() - began < 0.1
        assert {"retry-after", "ratelimit"} <= headers.keys()
        _, health = await stack.internal("/internal/health")
        assert health["checks"]["breaker:redis"][0]["observedValue"] != "closed"
        outage.end()
        await eventually(lambda: not stack.gateway.direct.active, "requests go through Redis again", 2.0)


async def test_switched_off_it_fails_fast_too(client: Redis, redis_url: str, outage: Outage, tmp_path: Path) -> None:
    """`direct_mode=off`: doors are not used, and nothing is spooled."""
    async with (
        endpoints("serve") as direct_workers,
        direct_stack(client, redis_url, tmp_path, direct_workers, direct=False) as stack,
    ):
        outage.begin()
        for _ in range(2):
            assert (await stack.infer())[0] == 503
        assert (direct_workers[0].hellos, (tmp_path / "spool").exists()) == ([], False)


@pytest.mark.parametrize("bad", ["busy", "hang up", "unfriendly", "nonsense", "another"])
async def test_what_one_worker_does_not_serve_another_does(
    client: Redis, redis_url: str, outage: Outage, tmp_path: Path, bad: str
) -> None:
    """Busy, gone, closed, speaking nonsense, answering another batch: everybody is served by the good worker."""
    async with (
        endpoints(bad, "serve") as direct_workers,
        direct_stack(client, redis_url, tmp_path, direct_workers) as stack,
    ):
        outage.begin()
        answers = await asyncio.gather(*(stack.infer({"input": f"n{n}"}, "paid") for n in range(20)))

        assert [(code, each["output"]) for code, each, _ in answers] == [(200, f"n{n}"[::-1]) for n in range(20)]
        assert direct_workers[0].hellos


async def test_a_silent_worker_costs_a_second(client: Redis, redis_url: str, outage: Outage, tmp_path: Path) -> None:
    """After it the batch is another worker's, one request at a time, and there is still time."""
    async with (
        endpoints("silent", "serve") as direct_workers,
        direct_stack(client, redis_url, tmp_path, direct_workers) as stack,
    ):
        outage.begin()
        answers = await asyncio.gather(*(stack.infer({"input": f"n{n}"}, "paid") for n in range(20)))

        assert [code for code, _, _ in answers] == [200] * 20
        assert max(each["metadata"]["latency_ms"] for _, each, _ in answers) < 3000
        second = [each["metadata"] for _, each, _ in answers if each["metadata"]["attempts"] == 2]
        assert {metadata["batch_size"] for metadata in second} <= {1}


async def test_a_model_that_hangs_costs_an_attempt(
    client: Redis, redis_url: str, outage: Outage, tmp_path: Path
) -> None:
    """The worker says `gpu_timeout` with seconds left: the request is run again, by another worker or the same one; one
    whose model always hangs ends so after the third time.
    """

    def hung(item: DirectItem) -> Outcome:
        return Outcome(item.id, "gpu_timeout", -1.0, 0, "", "")

    async with endpoints("serve") as (door,), direct_stack(client, redis_url, tmp_path, [door]) as stack:
        outage.begin()
        await stack.infer(tier_name="enterprise")
        hangs = [2]

        def sometimes(item: DirectItem) -> Outcome:
            hangs[0] -= 1
            return hung(item) if hangs[0] >= 0 else reverse(item)

        door.serve = sometimes
        status, document, _ = await stack.infer({"input": "abc"})
        assert (status, document["output"], document["metadata"]["attempts"]) == (200, "cba", 3)

        door.serve = hung
        before = len(door.batches)
        status, document, _ = await stack.infer({"input": "abc"})
        assert (status, document["error"]["code"]) == (504, "gpu_timeout")
        assert len(door.batches) - before == 3


async def test_workers_that_all_hang_up_cost_three_attempts_and_then_it_fails_fast(
    client: Redis, redis_url: str, outage: Outage, tmp_path: Path
) -> None:
    """`worker_lost` for the one that was tried, and `no_capacity` at once for who comes while no door opens."""
    async with (
        endpoints("hang up") as direct_workers,
        direct_stack(client, redis_url, tmp_path, direct_workers) as stack,
    ):
        outage.begin()
        status, document, _ = await stack.infer(tier_name="enterprise")
        assert (status, document["error"]["code"]) == (503, "worker_lost")
        assert len(direct_workers[0].batches) == 3
        status, document, _ = await stack.infer(tier_name="enterprise")
        assert (status, document["error"]["code"]) == (503, "no_capacity")
        message = "No GPU can be reached while Redis is not available; try again soon."
        assert document["error"]["message"] == message


def picky(item: DirectItem) -> Outcome:
    reversed_ = reverse(item)
    return reversed_ if reversed_.output != "dab" else Outcome(item.id, "poison_request", 0.0, 0, "v1", "")


async def test_a_bad_input_is_told_so(
    pool: Pool, client: Redis, redis_url: str, outage: Outage, tmp_path: Path
) -> None:
    """What the model refuses is the client's answer and the audit's row, as through Redis."""
    async with endpoints("serve") as direct_workers, direct_stack(client, redis_url, tmp_path, direct_workers) as stack:
        direct_workers[0].serve = picky
        outage.begin()
        status, document, _ = await stack.infer({"input": "bad"})
        assert (status, document["error"]["code"]) == (422, "poison_request")
        outage.end()
        await back(stack)
        _, ended = await audit_of(pool, document["error"]["request_id"])
        told = {(e.state, e.error_code, e.mode) for e in ended if e.delivered}
        assert told == {("failed", "poison_request", "direct")}


async def test_limits_hold_in_direct_mode(client: Redis, redis_url: str, outage: Outage, tmp_path: Path) -> None:
    """A quarter of the bucket to begin with; the rest is refused with the usual headers and no audit."""
    async with endpoints("serve") as direct_workers, direct_stack(client, redis_url, tmp_path, direct_workers) as stack:
        stack.catalog.set(
            tiers=(tier("enterprise", 1, 0.05), tier("free", 3, 0.1, requests_per_second=1.0, burst=20.0))
        )
        outage.begin()
        await stack.infer(tier_name="enterprise")  # Direct mode is on.
        answers = [await stack.infer() for _ in range(8)]

        assert [code for code, _, _ in answers] == [200] * 5 + [429] * 3
        _, document, headers = answers[-1]
        assert document["error"]["code"] == "rate_limit_exceeded"
        assert (
            0 < int(headers["retry-after-ms"]) < 1600
        )  # One of the 15 that are missing comes in 19/15 s, with jitter.
        assert (headers["x-ratelimit-limit-requests"], headers["x-ratelimit-remaining-requests"]) == ("20", "0")
        assert len(stack.gateway.direct._completion) == 0


async def test_health_says_who_serves_and_since_when(
    client: Redis, redis_url: str, outage: Outage, tmp_path: Path
) -> None:
    """Degraded, never down; ready all the time; healthy again afterwards."""
    async with (
        endpoints("serve", "serve") as direct_workers,
        direct_stack(client, redis_url, tmp_path, direct_workers) as stack,
    ):
        outage.begin()
        await stack.infer()
        await eventually(lambda: (stack.gateway.heartbeat.age_s() or 0) > 2.1, "the last look is old")
        status, health = await stack.internal("/internal/health")
        assert (status, health["status"]) == (200, "degraded")
        assert any("served by direct calls to 2 workers for" in each for each in health["reasons"])
        states = {name: check[0]["observedValue"] for name, check in health["checks"].items() if "breaker" in name}
        assert states["breaker:worker-1"] == states["breaker:worker-2"] == "closed"
        assert health["checks"]["direct:spool"][0]["observedValue"] > 0
        async with stack.http.get(stack.url + "/readyz") as answer:
            assert answer.status == 200
        outage.end()
        await back(stack)
        await stack.worker.heartbeat()

        async def well() -> bool:
            _, seen = await stack.internal("/internal/health")
            return not any("direct calls" in each for each in seen["reasons"])

        await eventually(well, "health knows that Redis is used again")


async def test_with_redis_well_nothing_is_direct(client: Redis, redis_url: str, tmp_path: Path) -> None:
    """No connection, no spool line, and no request looks at more than one boolean."""
    async with endpoints("serve") as direct_workers, direct_stack(client, redis_url, tmp_path, direct_workers) as stack:
        entered: list[Any] = []
        stack.gateway.direct.enter = entered.append  # type: ignore[method-assign,assignment]
        asking = asyncio.create_task(stack.infer())
        await eventually(lambda: served(stack, asking), "it is served through Redis")

        assert ((await asking)[0], entered, direct_workers[0].hellos) == (200, [], [])
        assert stack.gateway.direct.view().spool_bytes == 0


async def test_a_full_waiting_room_sheds_free_for_enterprise(
    client: Redis, redis_url: str, outage: Outage, tmp_path: Path
) -> None:
    """The last of the lowest tier makes room; nobody makes room for his own tier. Who was shed may try again."""
    async with endpoints("serve") as direct_workers, direct_stack(client, redis_url, tmp_path, direct_workers) as stack:
        direct = stack.gateway.direct
        direct._queue._max_waiting = 2
        outage.begin()
        await stack.infer(tier_name="enterprise")
        direct_workers[0].seconds = 0.5
        running = asyncio.create_task(stack.infer(tier_name="free"))
        await eventually(lambda: len(direct_workers[0].batches) == 2, "the worker is busy")
        waiting = [asyncio.create_task(stack.infer(tier_name="free"))]
        await eventually(lambda: len(direct._queue) == 1, "the first waits")
        waiting.append(asyncio.create_task(stack.infer(tier_name="free")))
        await eventually(lambda: len(direct._queue) == 2, "the second waits")
        status, document, headers = await stack.infer(tier_name="free")
        assert (status, document["error"]["code"]) == (503, "queue_full")
        assert 500 <= int(headers["retry-after-ms"]) <= 625
        first = asyncio.create_task(stack.infer(tier_name="enterprise"))
        status, document, _ = await waiting[1]
        assert (status, document["error"]["code"]) == (503, "shed_for_priority")
        assert [(await each)[0] for each in (running, first, waiting[0])] == [200, 200, 200]


@pytest.mark.parametrize(
    ("changes", "code"),
    [({"burst": 8.0, "requests_per_second": 0.001}, "rate_limit_exceeded"), ({"max_concurrency": 6}, "")],
)
async def test_a_list_past_redis_enters_whole_or_spends_nothing(
    client: Redis, redis_url: str, outage: Outage, tmp_path: Path, changes: dict[str, Any], code: str
) -> None:
    """Six where a quarter of a burst of eight is there: refused, no model sees any of them, and two can still enter."""
    async with direct_already(client, redis_url, tmp_path, outage) as (stack, door):
        stack.catalog.set(key=changes)
        seen = sum(map(len, door.batches))

        async def ask(prompts: list[str]) -> str:
            body, url = {"model": "tiny", "prompt": prompts}, f"{stack.url}/v1/completions"
            async with stack.http.post(url, json=body, headers=stack.key("paid")) as answer:
                return str((await answer.json()).get("error", {}).get("code", ""))

        assert await ask(["a"] * 6) == code
        assert sum(map(len, door.batches)) - seen == (0 if code else 6)
        assert await ask(["a"] * 2) == ""
        assert len(stack.gateway.pending_requests) == 0
