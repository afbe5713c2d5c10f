"""A cordoned worker as a process of its own: it ends what it runs, claims nothing more, and stays so over a restart."""

import pytest

from eventually import eventually
from integration.gpu_pool_fixtures import StartWorker, batch, faulty_models, replies, running, start_worker
from pool import Pool
from scheduler.protocol.presence import Cordons

__all__ = ["faulty_models", "start_worker"]


@pytest.fixture
async def cordons(pool: Pool) -> Cordons:
    return Cordons(pool.client, pool.keys)


async def test_it_ends_what_it_runs_and_claims_nothing_more(
    pool: Pool, cordons: Cordons, start_worker: StartWorker
) -> None:
    """Within the second it is seen as cordoned and does not count; uncordoned, it takes what waited."""
    worker = await start_worker(backend="simulated:1500")
    await worker.reaches("ready")
    first = await batch(pool, "abc")
    await eventually(lambda: running(pool, first[0]), "the first batch runs")

    await cordons.write(["w1"])
    view = await worker.reaches("cordoned", timeout_s=1.0)  # Asked for.
    assert (view.in_flight, view.healthy, await pool.presence.census()) == (1, False, (0, 1))

    assert [reply.output for reply in await replies(pool, first)] == ["cba"]
    second = await batch(pool, "def")
    view = await worker.reaches("cordoned")
    await eventually(lambda: _idle(pool), "a heartbeat without work")
    assert (await pool.attempts(second[0]), await pool.client.llen(pool.keys.batch_queue)) == (0, 1)

    await cordons.write([])
    assert [reply.output for reply in await replies(pool, second)] == ["fed"]
    await worker.reaches("ready")


async def _idle(pool: Pool) -> bool:
    (worker,) = (await pool.presence.observe([])).workers
    return worker.in_flight == 0 and worker.age_ms < 200


async def test_a_restart_does_not_lift_it(pool: Pool, cordons: Cordons, start_worker: StartWorker) -> None:
    """A worker of the same id is never ready in between, nor does it claim what stands ready; nor when Redis forgets."""
    await cordons.write(["w1"])
    waiting = await batch(pool, "abc")
    worker = await start_worker()
    await worker.reaches("cordoned")
    assert await worker.stop() == 0

    again = await start_worker()
    await again.reaches("cordoned")
    assert await pool.attempts(waiting[0]) == 0

    await pool.client.flushall()  # Now nobody has told Redis: what the worker knows holds.
    await pool.gateway_lives("g1")
    await again.reaches("cordoned")
    await cordons.write(["w1"])
    await again.reaches("cordoned")
    await cordons.write([])
    await again.reaches("ready")
