"""The whole worker, as a process of its own, against a real Redis: it runs, loses its model, drains, and comes back."""

import asyncio
import os
import signal
import time

import psutil
import pytest

from eventually import eventually
from gpu_pool.worker.streams import Outgoing
from gpu_pool.worker.worker import BLOCK_S, WorkerConfig, run_worker
from held_pops import pops_held
from integration.gpu_pool_fixtures import (
    RunningWorker,
    StartWorker,
    batch,
    ended,
    faulty_models,
    replies,
    running,
    start_worker,
)
from pool import TIERS, Pool
from scheduler.protocol.pool_view import WorkerView

__all__ = ["faulty_models", "start_worker"]


async def pair(start_worker: StartWorker) -> list[RunningWorker]:
    """Two workers that are ready."""
    workers = [await start_worker(name, "simulated:1000") for name in ("w1", "w2")]
    for worker in workers:
        await worker.reaches("ready")
    return workers


async def victim_and_rescuer(pool: Pool, workers: list[RunningWorker]) -> list[RunningWorker]:
    """The worker that runs the one batch, then the other."""

    async def owner() -> str:
        for batch_id in await pool.client.zrange(pool.keys.leases, 0, -1):
            name = await pool.client.hget(pool.keys.batch(batch_id.decode()), "worker")
            return name.decode() if name else ""
        return ""

    name = await eventually(owner, "the batch is claimed")
    return sorted(workers, key=lambda worker: worker.name != name)


async def test_a_batch_runs_and_the_worker_tells_of_it(pool: Pool, start_worker: StartWorker) -> None:
    """Outputs, times and names arrive; the worker registered as ready before it claimed."""
    worker = await start_worker()
    view = await worker.reaches("ready")
    ids = await batch(pool, "hello", "world")

    first, second = await replies(pool, ids)

    assert (view.healthy, view.backend, view.model_version) == (True, "simulated:20", "simulated-20ms")
    assert (first.output, second.output, first.state) == ("olleh", "dlrow", "completed")
    assert (first.worker_id, first.attempts, first.batch_size, first.tokens_used) == ("w1", 1, 2, 1)
    assert first.gpu_ms >= 20
    assert await pool.inflight() == {}


async def test_heartbeats_tell_utilization_and_the_measured_rate(pool: Pool, start_worker: StartWorker) -> None:
    """After full batches the rate at full batch is known, and the share of busy time is above nothing."""
    await start_worker(max_batch_size=4)
    for _ in range(5):
        await replies(pool, await batch(pool, "a", "b", "c", "d"))

    async def measured() -> WorkerView | None:
        seen = await pool.presence.observe(TIERS)
        return next((w for w in seen.workers if w.rps > 0 and w.utilization > 0), None)

    view = await eventually(measured, "a heartbeat with rate and utilization")

    assert 100 < view.rps <= 200  # 4 requests in 20 ms and a little
    assert 20 <= view.service_p95_ms < 100


async def test_a_batch_without_time_is_refused_once_then_measured_again(pool: Pool, start_worker: StartWorker) -> None:
    """A p95 over what requests have left ends them at once; but it must not refuse for ever what it no longer measures."""
    await start_worker(backend="simulated:60")
    for _ in range(20):
        await replies(pool, await batch(pool, "a"))

    (refused,) = await replies(pool, await batch(pool, "b", total_ms=59))
    (tried,) = await replies(pool, await batch(pool, "c", total_ms=59))

    assert (refused.error_code, refused.gpu_ms, refused.output) == (
        "deadline_exceeded",
        -1.0,
        "Too little time was left to run this request.",
    )
    assert (tried.error_code, tried.output) == ("", "c")


async def test_a_poison_request_fails_alone(pool: Pool, start_worker: StartWorker) -> None:
    """Its neighbours complete in the same attempt."""
    await start_worker(backend="faulty_models:picky")

    good, bad, fine = await replies(pool, await batch(pool, "one", "bad", "two"))

    assert [(r.output, r.error_code) for r in (good, fine)] == [("eno", ""), ("owt", "")]
    assert (bad.state, bad.error_code, bad.attempts) == ("failed", "poison_request", 1)


async def test_a_request_that_cannot_be_read_fails_alone(pool: Pool, start_worker: StartWorker) -> None:
    """Junk where the body should be is that request's end, and nobody else's."""
    ids = await batch(pool, "one", "two")
    await pool.client.hset(pool.keys.request(ids[0]), "body", b"\xc1")
    await start_worker()

    junk, good = await replies(pool, ids)

    assert (junk.error_code, good.output) == ("invalid_request", "owt")


async def test_a_killed_model_process_costs_its_batch_one_attempt(pool: Pool, start_worker: StartWorker) -> None:
    """Kill -9 in the middle: the other worker takes it, in halves, though no reaper is there to look at leases."""
    workers = await pair(start_worker)
    ids = await batch(pool, "hello", "world")
    victim, rescuer = await victim_and_rescuer(pool, workers)
    lost_pid = victim.model_pid
    assert lost_pid is not None

    os.kill(lost_pid, signal.SIGKILL)

    answers = await replies(pool, ids)
    assert [(r.output, r.batch_size, r.attempts) for r in answers] == [("olleh", 1, 2), ("dlrow", 1, 2)]
    assert rescuer.name in {r.worker_id for r in answers}  # The victim's next process may have had the other half.
    await victim.reaches("ready")
    assert victim.model_pid not in {None, lost_pid}


async def test_a_lost_model_is_told_at_once_and_replaced(pool: Pool, start_worker: StartWorker) -> None:
    """The heartbeat says down well before its period ends, and ready again when a new process is warm."""
    worker = await start_worker(heartbeat_ms=2000)
    await worker.reaches("ready")
    assert worker.model_pid is not None

    os.kill(worker.model_pid, signal.SIGKILL)

    await worker.reaches("down", timeout_s=1.5)
    await worker.reaches("ready")
    (reply,) = await replies(pool, await batch(pool, "again"))
    assert reply.output == "niaga"


async def test_a_killed_worker_leaves_its_batch_to_the_reaper(pool: Pool, start_worker: StartWorker) -> None:
    """With the supervisor gone too, its model process ends, and the lease alone brings the batch back."""
    workers = await pair(start_worker)
    ids = await batch(pool, "hello")
    victim, rescuer = await victim_and_rescuer(pool, workers)
    lost_pid = victim.model_pid
    assert lost_pid is not None

    victim.process.kill()
    await victim.process.wait()
    await eventually(lambda: ended(lost_pid), "the model process is gone")

    async def reaped() -> bool:
        await pool.gateway_lives("g1")
        await pool.terminations.reap(0)
        return await pool.results.fetch(ids) != [None]

    await eventually(reaped, "the reaped batch ran elsewhere")
    (reply,) = await replies(pool, ids)
    assert (reply.output, reply.worker_id, reply.attempts) == ("olleh", rescuer.name, 2)


async def test_a_hung_batch_is_killed_at_its_cap_and_run_again(pool: Pool, start_worker: StartWorker) -> None:
    """The same worker runs it in a fresh process; the hang cost the cap and one attempt."""
    worker = await start_worker(backend="faulty_models:hangs_once", gpu_timeout_ms=600)
    await worker.reaches("ready")

    (reply,) = await replies(pool, await batch(pool, "hello"))

    assert (reply.output, reply.attempts) == ("olleh", 2)


async def test_leases_are_renewed_while_a_batch_runs(pool: Pool, start_worker: StartWorker) -> None:
    """A batch of 1.5 s outlives its 600 ms lease, with a reaper at work all the time."""
    await start_worker(backend="simulated:1500")
    ids = await batch(pool, "hello")

    async def answered() -> bool:
        await pool.gateway_lives("g1")
        await pool.terminations.reap(0)
        return await pool.results.fetch(ids) != [None]

    await eventually(answered, "the batch ended under the reaper's eyes")
    (reply,) = await replies(pool, ids)
    assert (reply.output, reply.attempts) == ("olleh", 1)


async def test_the_result_of_a_lost_lease_is_dropped(pool: Pool, start_worker: StartWorker) -> None:
    """Somebody else owns the batch by now: first writer wins, and the late worker changes nothing."""
    worker = await start_worker(backend="simulated:1000")
    ids = await batch(pool, "hello")
    await eventually(lambda: running(pool, ids[0]), "the batch is claimed")
    batch_id = (await pool.client.zrange(pool.keys.leases, 0, -1))[0].decode()
    await pool.client.hset(pool.keys.batch(batch_id), "token", "another")

    await worker.reaches("busy")
    await worker.reaches("ready")

    assert await pool.states(ids) == ["processing"]


async def test_sigterm_lets_the_running_batch_end(pool: Pool, start_worker: StartWorker) -> None:
    """Draining is told, the batch completes, the worker says goodbye and exits 0; a second batch stays ready."""
    worker = await start_worker(backend="simulated:800")
    ids = await batch(pool, "hello")
    await eventually(lambda: running(pool, ids[0]), "the batch is claimed")
    later = await batch(pool, "later")

    worker.process.send_signal(signal.SIGTERM)
    await worker.reaches("draining")
    code = await worker.stop()

    assert code == 0
    assert await worker.view() is None
    assert [r.output for r in await replies(pool, ids)] == ["olleh"]
    assert await pool.states(later) == ["processing"]
    assert await pool.attempts(later[0]) == 0
    assert await pool.pop() is not None


async def test_sigterm_hands_back_what_cannot_end_in_time_uncounted(pool: Pool, start_worker: StartWorker) -> None:
    """A batch longer than the drain returns to its tier queue as if nothing had happened."""
    worker = await start_worker(backend="simulated:2500", drain_ms=300)
    ids = await batch(pool, "hello", "world")
    await eventually(lambda: running(pool, ids[0]), "the batch is claimed")

    code = await worker.stop(signal.SIGINT)

    assert code == 0
    assert await pool.states(ids) == ["queued", "queued"]
    assert await pool.depth("free") == 2
    assert [await pool.attempts(i) for i in ids] == [0, 0]
    assert await pool.inflight() == {}


async def test_an_idle_worker_stops_and_takes_its_model_along(pool: Pool, start_worker: StartWorker) -> None:
    """Within the blocking read and a little, with no process left."""
    worker = await start_worker()
    await worker.reaches("ready")
    model_pid = worker.model_pid
    assert model_pid is not None

    code = await worker.stop()

    assert code == 0
    assert not psutil.pid_exists(model_pid)


async def test_a_batch_that_comes_while_draining_stays_in_line(pool: Pool, start_worker: StartWorker) -> None:
    """What the last blocking read gave is pushed back at once; nobody has to wait for a lease to run out."""
    worker = await start_worker()
    await worker.reaches("ready")
    async with pops_held(pool.client):
        worker.process.send_signal(signal.SIGTERM)
        await worker.reaches("draining")
        ids = await batch(pool, "hello")

        assert await worker.process.wait() == 0

    assert await pool.pop() is not None
    assert await pool.attempts(ids[0]) == 0


async def test_an_idle_worker_does_not_wait_for_its_last_pop(pool: Pool, start_worker: StartWorker) -> None:
    """It blocks for seconds; Redis is asked to end it."""
    worker = await start_worker(drain_ms=60_000)
    await worker.reaches("ready")
    await eventually(lambda: _blocked(pool), "it pops")
    began = time.monotonic()

    assert await worker.stop() == 0

    assert time.monotonic() - began < BLOCK_S / 2


async def _blocked(pool: Pool) -> bool:
    return int((await pool.client.info("clients"))["blocked_clients"]) == 1


async def test_a_backend_that_is_not_there_stops_the_worker_with_one_sentence(
    pool: Pool, start_worker: StartWorker
) -> None:
    """No restart helps, so none is tried."""
    worker = await start_worker(backend="surely_not_there:f")

    _, stderr = await worker.process.communicate()

    assert worker.process.returncode == 1
    assert b"refused: Backend 'surely_not_there:f': the module 'surely_not_there' is not found." in stderr


async def test_a_model_that_dies_while_loading_is_started_ever_more_rarely(
    pool: Pool, start_worker: StartWorker
) -> None:
    """The worker stays, says down, and claims nothing."""
    worker = await start_worker(backend="faulty_models:DiesWhileLoading")
    await worker.reaches("down")
    ids = await batch(pool, "hello")

    seen: set[int] = set()

    def tried_again() -> bool:
        pid = worker.model_pid
        seen.update({pid} if pid else ())
        return len(seen) >= 3

    await eventually(tried_again, "a third process was started")
    assert await pool.attempts(ids[0]) == 0
    assert await worker.stop() == 0


async def test_what_a_model_computes_for_nothing_is_told(pool: Pool, start_worker: StartWorker) -> None:
    """A long text beside short ones: their padding is in the heartbeat."""
    worker = await start_worker(backend="tiny", torch_threads=1)
    await worker.reaches("ready", 60.0)
    assert (await worker.reaches("ready")).padding_waste == 0.0

    await replies(pool, await batch(pool, "a" * 300, "b", "c", "d"))

    async def wasting() -> bool:
        view = await worker.view()
        return view is not None and 0.0 < view.padding_waste < 1.0

    await eventually(wasting, "the padding is told")
    assert await worker.stop() == 0


async def test_a_worker_whose_task_ends_leaves_and_is_missed(
    pool: Pool, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would look well and do half of its work: it ends with exit code 1 so that it is restarted, and says no goodbye."""

    async def ends(_: Outgoing) -> None:
        raise ValueError

    monkeypatch.setattr(Outgoing, "run", ends)
    config = WorkerConfig(redis_url=redis_url, worker_id="w9", backend="simulated:20", device="cpu")
    async with asyncio.timeout(30):
        assert await run_worker(config) == 1

    assert [worker.id for worker in (await pool.presence.observe(TIERS)).workers] == ["w9"]
