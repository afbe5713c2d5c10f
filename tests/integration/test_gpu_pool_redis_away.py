"""A worker while Redis hangs, restarts empty, or loses a reply: it goes on, loses nothing, and never spins."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from eventually import eventually
from gpu_pool.config import WorkerConfig
from gpu_pool.worker.worker import BLOCK_S, Worker
from pool import TIERS, Pool
from scheduler.errors import RedisUnavailable
from scheduler.protocol.batches import Batches, ClaimedBatch, ReadyBatches
from scheduler.protocol.pool_view import WorkerReport
from scheduler.protocol.presence import Presence
from scheduler.protocol.replies import IncrementChannel
from scheduler.redis_client.connections import blocking_client, command_client
from scheduler.redis_client.keys import Keys
from tierlane.embedded.redis import EmbeddedRedis


class CountingReady(ReadyBatches):
    """Counts how often the line was looked at."""

    pops = 0
    hung_up = 0

    async def pop(self) -> str | None:
        self.pops += 1
        return await super().pop()

    def hang_up(self) -> None:
        self.hung_up += 1
        super().hang_up()


class DeafOnce(Batches):
    """The first claim takes effect, but its reply is lost."""

    deaf = True

    async def claim(self, batch_id: str, worker_id: str, token: str) -> ClaimedBatch | None:
        claimed = await super().claim(batch_id, worker_id, token)
        if self.deaf:
            self.deaf = False
            raise RedisUnavailable("the reply was lost")
        return claimed


class Mute(Presence):
    """No heartbeat arrives; counts the tries."""

    tries = 0

    async def worker_beat(self, heartbeat: WorkerReport) -> None:
        self.tries += 1
        raise RedisUnavailable("the heartbeat did not arrive")


@dataclass
class Scene:
    """A worker in this process, its Redis, and a look at both."""

    server: EmbeddedRedis
    worker: Worker
    ready: CountingReady
    presence: Presence
    pool: Pool

    async def alive(self) -> bool:
        workers = (await self.pool.presence.observe(TIERS)).workers
        return [(worker.id, worker.status) for worker in workers] == [("w1", "ready")]

    async def formed(self) -> list[str]:
        await self.pool.gateway_lives("g1")
        ids = await self.pool.queue(2)
        await self.pool.form([("free", 2)])
        return ids

    async def outputs(self, ids: list[str]) -> list[str]:
        async def ended() -> list[str]:
            replies = await self.pool.results.fetch(ids)
            return [reply.output for reply in replies if reply and reply.attempts == 1]

        async def all_ended() -> list[str]:
            found = await ended()
            return found if len(found) == len(ids) else []

        return await eventually(all_ended, "every request completed in its first attempt")


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[EmbeddedRedis]:
    """A Redis of this test's own, to be stopped and killed."""
    server = EmbeddedRedis(tmp_path, tmp_path / "socket", ephemeral=True)
    await server.start()
    yield server
    await server.stop()


@pytest.fixture
async def scene(server: EmbeddedRedis, request: pytest.FixtureRequest) -> AsyncIterator[Scene]:
    """A running worker; the marker's parameters replace its parts."""
    parts: dict[str, Callable[..., object]] = getattr(request, "param", {})
    keys, commands, blocking = Keys(), command_client(server.url), blocking_client(server.url)
    batches, presence = parts.get("batches", Batches)(commands, keys), parts.get("presence", Presence)(commands, keys)
    assert isinstance(batches, Batches)
    assert isinstance(presence, Presence)
    ready = CountingReady(blocking, keys, BLOCK_S)
    config = WorkerConfig(server.url, "w1", "simulated:300")
    worker = Worker(config, batches, ready, presence, IncrementChannel(commands, keys))
    running = asyncio.create_task(worker.run())
    yield Scene(server, worker, ready, presence, Pool(commands, keys))
    worker.drain()
    assert await running == 0
    await commands.aclose()
    await blocking.aclose()


async def test_a_worker_registers_again_with_a_redis_that_came_back_empty(scene: Scene) -> None:
    """Killed without persistence, then started: the next heartbeat registers, and batches run."""
    await eventually(scene.alive, "the worker is ready")
    os.kill(scene.server.pid, signal.SIGKILL)
    await eventually(lambda: not scene.worker._heartbeat.working.is_set(), "a heartbeat failed")

    await scene.server.start()

    await eventually(scene.alive, "the worker registered again")
    assert await scene.outputs(await scene.formed()) == ["olleh", "olleh"]


async def test_a_finish_waits_for_redis(scene: Scene) -> None:
    """Redis hangs when the batch ends: its results arrive when it answers again, in the first attempt."""
    await eventually(scene.alive, "the worker is ready")
    ids = await scene.formed()
    await eventually(lambda: scene.worker._execution.running, "the batch runs")

    os.kill(scene.server.pid, signal.SIGSTOP)
    await eventually(lambda: not scene.worker._execution.running, "the model is done")
    given_up_at = time.monotonic() + 0.6
    await eventually(lambda: time.monotonic() > given_up_at, "a finish and its retry timed out")
    assert scene.worker._pipeline.in_flight == 2
    os.kill(scene.server.pid, signal.SIGCONT)

    assert await scene.outputs(ids) == ["olleh", "olleh"]


async def test_a_pop_at_a_redis_that_hangs_is_ended(scene: Scene) -> None:
    """The heartbeat knows long before the pop's own deadline; a batch that comes afterwards is run at once."""
    await eventually(scene.alive, "the worker is ready")
    os.kill(scene.server.pid, signal.SIGSTOP)

    await eventually(lambda: scene.ready.hung_up, "the pop is ended")

    assert not scene.worker._heartbeat.working.is_set()
    os.kill(scene.server.pid, signal.SIGCONT)
    await eventually(scene.worker._heartbeat.working.is_set, "a heartbeat arrived")
    assert await scene.outputs(await scene.formed()) == ["olleh", "olleh"]


async def test_nothing_spins_while_redis_is_away(scene: Scene) -> None:
    """Without a heartbeat the line is not even looked at."""
    await eventually(scene.alive, "the worker is ready")
    os.kill(scene.server.pid, signal.SIGKILL)
    await eventually(lambda: not scene.worker._heartbeat.working.is_set(), "a heartbeat failed")

    looked, until = scene.ready.pops, time.monotonic() + 1.0
    await eventually(lambda: time.monotonic() > until, "a second has passed")

    assert scene.ready.pops - looked <= 1
    await scene.server.start()


@pytest.mark.parametrize("scene", [{"batches": DeafOnce}], indirect=True)
async def test_a_claim_whose_reply_was_lost_costs_no_attempt(scene: Scene) -> None:
    """The worker may own the batch without knowing it: it hands it back, and the requests run in their first attempt."""
    await eventually(scene.alive, "the worker is ready")
    ids = await scene.formed()

    async def queued_again() -> bool:
        return await scene.pool.states(ids) == ["queued", "queued"]

    await eventually(queued_again, "the batch was handed back")
    await scene.pool.form([("free", 2)])
    assert await scene.outputs(ids) == ["olleh", "olleh"]


@pytest.mark.parametrize("scene", [{"presence": Mute}], indirect=True)
async def test_nothing_is_claimed_before_the_first_heartbeat_arrived(scene: Scene) -> None:
    """A worker that nobody knows would be reaped at once."""
    assert isinstance(scene.presence, Mute)
    mute = scene.presence
    ids = await scene.formed()
    await eventually(scene.worker._supervisor.ready.is_set, "the model is ready")

    before = mute.tries
    await eventually(lambda: mute.tries > before + 2, "more heartbeats failed")

    assert scene.ready.pops == 0
    assert await scene.pool.attempts(ids[0]) == 0
