"""SIGKILL at every failpoint, one after the other, under load: no request is lost, doubled or swapped."""

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
from redis.exceptions import RedisError

from configs import worker_config
from e2e.failpoint_scene import Load, Response, Scene, scene_on
from eventually import eventually
from held_pops import pops_held
from pool import Pool, done
from scheduler.failpoints import FAILPOINTS
from scheduler.redis_client.connections import command_client
from scheduler.tasks import end_all
from stack import Stack, start_stack

ENOUGH = 500  # Responses that the check needs; a fast machine crosses all gaps with fewer.
ELSEWHERE = {
    "drain_unreleased",  # Needs a batch that takes longer than the drain: see below.
    "followers_unnotified",  # Needs equal requests: tests/e2e/test_equal_requests.py
}


@pytest.fixture
def gaps(tmp_path: Path) -> Path:
    """Where a file with the name of a failpoint makes the next process die there."""
    directory = tmp_path / "gaps"
    directory.mkdir()
    return directory


@pytest.fixture
def gap_stack(tmp_path: Path, gaps: Path) -> Iterator[Stack]:
    """Two gateways, two workers, every process with its failpoints armed."""
    options = ("--gateways", "2", "--workers", "2", "--backend", "simulated:50")
    with start_stack(tmp_path / "stack", *options, environment={"TIERLANE_TEST_FAILPOINTS": str(gaps)}) as stack:
        yield stack


async def die_after_a_drop(scene: Scene, name: str) -> None:
    """Gateways lose their subscriptions, which may be a loss of data, and one dies while it resubmits."""
    await scene.whole("gateway")
    scene.arm(name)
    async with gateway_death(scene):
        cutting = asyncio.create_task(drop_subscriptions(scene))
        await scene.crossing(name)
        await end_all([cutting])


async def drop_subscriptions(scene: Scene) -> None:
    """Drop every subscription repeatedly: at one time no request may wait, and nothing is resubmitted."""
    while True:
        with contextlib.suppress(RedisError):
            await scene.client.execute_command("CLIENT", "KILL", "TYPE", "pubsub")
        await asyncio.sleep(1.5)


async def die_after_a_lost_model(scene: Scene) -> None:
    """A model process dies with a batch of the queue, and then its worker. If the batch was a direct one, another process dies."""
    await scene.whole("worker")
    scene.arm("answer_unsent", "loss_unreported")
    losing = asyncio.create_task(scene.keep_armed("answer_unsent"))
    await scene.crossing("answer_unsent", "loss_unreported")
    await end_all([losing])


async def die_draining(scene: Scene, load: Load) -> None:
    """A draining worker pops one more batch, and dies before it has pushed it back."""
    await scene.whole("worker")
    await load.pause()
    scene.arm("drain_popped")
    async with pops_held(scene.client):
        name, pid = min(scene.stack.pids("worker").items())
        os.kill(pid, signal.SIGTERM)
        await eventually(lambda: scene.draining(name), "the worker drains")
        load.resume()
        await scene.crossing("drain_popped")


async def die_past_redis(scene: Scene) -> None:
    """Redis is stopped: a worker dies with a direct batch, and a gateway that has written its audit to the spool."""
    await scene.whole("worker", "gateway")
    await scene.observed()
    scene.arm("direct_unanswered", "spool_unanswered")
    async with gateway_death(scene), redis_stopped(scene):
        await scene.crossing("direct_unanswered", "spool_unanswered")


async def die_unsent(scene: Scene) -> None:
    """Redis is stopped: a gateway has the accepted records of its first batch on disk, and dies before it calls a worker."""
    await scene.whole("worker", "gateway")
    await scene.observed()
    scene.arm("direct_unsent")
    async with gateway_death(scene), redis_stopped(scene):
        await scene.crossing("direct_unsent")


async def die_merging(scene: Scene) -> None:
    """Redis was stopped: a gateway dies when its records are merged, and still in its spool."""
    await scene.whole("worker", "gateway")
    await scene.observed()
    async with gateway_death(scene):
        async with redis_stopped(scene):
            await eventually(scene.spooled, "a record in a spool")
            scene.arm("spool_unremoved")
        await scene.crossing("spool_unremoved")


@contextlib.asynccontextmanager
async def redis_stopped(scene: Scene) -> AsyncIterator[None]:
    """Redis is suspended while the block runs."""
    (pid,) = scene.stack.pids("redis").values()
    scene.timeline.append((time.monotonic(), "Redis is stopped"))
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)
        scene.timeline.append((time.monotonic(), "Redis continues"))


@contextlib.asynccontextmanager
async def gateway_death(scene: Scene) -> AsyncIterator[None]:
    """A gateway dies in the block: connections may break until half a second later."""
    began = time.monotonic()
    yield
    scene.gateway_deaths.append((began, time.monotonic() + 0.5))


async def every_gap(scene: Scene, load: Load) -> None:
    """One after the other, the roles in turn so that each has time to restart."""
    await scene.die_at("wake_popped", role="scheduler")
    await scene.die_at("admit_unasked", role="gateway")
    await scene.die_at("batch_popped", role="worker")
    await scene.die_at("form_undone", role="scheduler")
    await scene.die_at("admit_unprocessed", role="gateway")
    await scene.whole("scheduler")
    await scene.die_at("batch_claimed", "reaped", role="worker")
    await scene.die_at("reply_unwritten", role="gateway")
    await scene.die_at("batch_ran", role="worker")
    await scene.die_at("form_unnoted", role="scheduler")
    await die_after_a_drop(scene, "loss_seen")
    await scene.die_at("batch_finished", role="worker")
    await scene.die_at("audit_taken", role="scheduler")
    await die_after_a_drop(scene, "resent_records_kept")
    await die_after_a_lost_model(scene)
    await scene.die_at("audit_uncommitted", role="scheduler")
    await die_draining(scene, load)
    await scene.die_at("audit_undropped", role="scheduler")
    await die_past_redis(scene)
    await die_unsent(scene)
    await die_merging(scene)


@pytest.mark.timeout(180)
async def test_a_crash_in_any_gap_loses_nothing(gap_stack: Stack, gaps: Path) -> None:
    """Each request at a living gateway gets one response, and each accepted request has one closed row."""
    client = command_client(gap_stack.redis_url)
    load = Load(gap_stack)
    async with scene_on(gap_stack, gaps, client) as scene:
        await scene.whole("scheduler")
        running = asyncio.create_task(load.run())
        await every_gap(scene, load)
        await scene.whole("gateway", "worker", "scheduler")
        await eventually(lambda: len(load.responses) > ENOUGH, "there are enough responses", 60.0)
        load.stop()
        await running
        rows = await scene.rows()
        deaths = scene.gateway_deaths
    await client.aclose()

    assert scene.crossed == set(FAILPOINTS) - ELSEWHERE
    for at, event in scene.timeline:
        print(f"{at - load.responses[0].sent:7.2f} s  {event}")
    check(load.responses, deaths)
    by_trace = Counter(row["trace_id"] for row in rows)
    assert {trace: count for trace, count in by_trace.items() if count > 1} == {}
    ends = {row["id"]: row["http_status"] for row in rows}
    assert [one for one in load.responses if one.status == 200 and ends.get(one.request_id) != 200] == []


WORKER = """
import msgspec, sys, uvloop
from pathlib import Path
from gpu_pool.worker.worker import WorkerConfig, run_worker
from scheduler.failpoints import arm
arm(Path(sys.argv[2]))
sys.exit(uvloop.run(run_worker(msgspec.json.decode(sys.argv[1], type=WorkerConfig))))
"""


async def test_a_crash_before_a_draining_worker_releases_its_batch_loses_nothing(
    pool: Pool, redis_url: str, gaps: Path
) -> None:
    """The drain time is over and the batch is stopped; the worker dies, and another worker runs the batch."""
    config = asdict(worker_config(redis_url, backend="simulated:5000", device="cpu", drain_ms=50))
    worker = await asyncio.create_subprocess_exec(sys.executable, "-c", WORKER, json.dumps(config), str(gaps))
    (request_id,) = await pool.queue(1, total_ms=30_000)
    await pool.form([("free", 1)])

    async def runs() -> bool:
        await pool.gateway_lives("g1")
        return await pool.attempts(request_id) == 1

    await eventually(runs, "it runs", 20.0)
    (gaps / "drain_unreleased").touch()
    worker.send_signal(signal.SIGTERM)
    assert await worker.wait() == -signal.SIGKILL

    async def released() -> str | None:
        await pool.gateway_lives("g1")
        await pool.terminations.reap(0)
        return await pool.pop()

    batch_id = await eventually(released, "the lease expires")
    claimed = await pool.batches.claim(batch_id or "", "w2", "token")
    assert claimed is not None
    assert [(member.id, member.attempt) for member in claimed.requests] == [(request_id, 2)]
    assert await pool.batches.finish(claimed.batch_id, "token", [done(request_id)]) == 0


def check(responses: list[Response], deaths: list[tuple[float, float]]) -> None:
    """Every response is right, and only requests at a dying gateway have none."""
    answered = [one for one in responses if one.status]
    broken = [one for one in responses if not one.status]
    assert len(responses) > ENOUGH
    assert [one for one in broken if not any(one.sent < end and one.ended > begin for begin, end in deaths)] == []
    assert Counter(one.request_id for one in answered).most_common(1)[0][1] == 1
    assert [one for one in answered if one.status != 200 or not one.echoed] == []
