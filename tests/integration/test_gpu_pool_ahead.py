"""A batch that was claimed ahead and never began is handed back uncounted, whatever ended its wait."""

import pytest

from eventually import eventually
from gpu_pool.worker import prefetch
from gpu_pool.worker.worker import Worker
from integration.gpu_pool_direct import StartHere, start_here
from integration.gpu_pool_fixtures import batch, replies, running
from pool import Pool
from scheduler.protocol.replies import Reply

__all__ = ["start_here"]


@pytest.fixture
async def waiting(
    pool: Pool, redis_url: str, start_here: StartHere, monkeypatch: pytest.MonkeyPatch
) -> tuple[Worker, str, str]:
    """A worker that runs one batch and holds another one ahead; and the request of each."""
    monkeypatch.setattr(prefetch, "AHEAD_MS", 10_000.0)  # As soon as the running one has begun.
    worker = await start_here("simulated:400", redis_url=redis_url)
    await replies(pool, await batch(pool, "measured"))
    (runs,), (waits,) = await batch(pool, "runs"), await batch(pool, "waits")
    await eventually(lambda: running(pool, waits), "the second one is claimed, too")
    assert await running(pool, runs)
    return worker, runs, waits


async def test_a_worker_that_stops_hands_back_what_it_claimed_ahead(
    pool: Pool, waiting: tuple[Worker, str, str]
) -> None:
    """At once, while the running batch ends as it should."""
    worker, runs, waits = waiting

    worker.drain()

    await eventually(lambda: pool.depth("free"), "it waits in its tier queue again")
    assert await pool.attempts(waits) == 0
    (reply,) = await replies_of(pool, runs)
    assert (reply.output, reply.attempts) == ("snur", 1)


async def test_a_model_that_is_lost_costs_the_batch_ahead_no_attempt(
    pool: Pool, waiting: tuple[Worker, str, str]
) -> None:
    """Only the batch that ran is counted; both are answered by the next process."""
    worker, runs, waits = waiting
    model = worker._supervisor.model
    assert model is not None

    model.kill()

    first, second = await replies(pool, [runs, waits])
    assert [(r.output, r.attempts) for r in (first, second)] == [("snur", 2), ("stiaw", 1)]


async def replies_of(pool: Pool, request_id: str) -> list[Reply]:
    async def there() -> list[Reply]:
        return [reply for reply in await pool.results.fetch([request_id]) if reply is not None]

    return await eventually(there, "it has its reply")
