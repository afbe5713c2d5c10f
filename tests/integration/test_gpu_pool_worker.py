"""The worker as its own process with a real Redis: serving, lost processes, stalls, draining, cordons."""

import os
import signal
import socket
import time
from collections.abc import AsyncIterator
from contextlib import nullcontext
from pathlib import Path

import psutil
import pytest

from configs import worker_config
from eventually import eventually
from gpu_pool.worker.streams import Outgoing
from gpu_pool.worker.worker import BLOCK_S, run_worker
from held_pops import pops_held
from integration.gpu_pool_fixtures import StartWorker, batch, faulty_models, replies, running, start_worker
from pool import TIERS, Pool
from scheduler.protocol.cordons import Cordons
from scheduler.protocol.pool_view import WorkerView
from tierlane_tools.chaos.faults.proxy import FaultProxy, NetworkFault

__all__ = ["faulty_models", "start_worker"]


async def reap_until_answered(pool: Pool, request_id: str) -> None:
    async def answered() -> bool:
        await pool.gateway_lives("g1")
        await pool.terminations.reap(0)
        return await pool.results.fetch([request_id]) != [None]

    await eventually(answered, "the request ended", 20.0)


async def test_batches_run_and_heartbeats_report_what_was_measured(pool: Pool, start_worker: StartWorker) -> None:
    """The reply has output, times and names; the heartbeat has rate, service time and utilization."""
    view = await (await start_worker(max_batch_size=4)).reaches("ready")
    for _ in range(5):
        first, *_ = await replies(pool, await batch(pool, "hello", "b", "c", "d"))

    async def measured() -> WorkerView | None:
        workers = (await pool.presence.observe(TIERS)).workers
        return next((w for w in workers if w.rps > 0 and w.utilization > 0), None)

    measured_view = await eventually(measured, "a heartbeat with rate and utilization")
    assert (view.healthy, view.backend, view.model_version) == (True, "simulated:20", "simulated-20ms")
    assert (first.output, first.state, first.worker_id, first.attempts) == ("olleh", "completed", "w1", 1)
    assert (first.batch_size, first.tokens_used, first.gpu_ms >= 20) == (4, 1, True)
    assert 100 < measured_view.rps <= 200
    assert 20 <= measured_view.service_p95_ms < 100
    assert await pool.inflight() == {}


async def reports(pool: Pool, reason: str) -> bool:
    return [worker.reason for worker in (await pool.presence.observe([])).workers] == [reason]


async def test_killed_model_process_costs_one_attempt(pool: Pool, start_worker: StartWorker) -> None:
    """The loss is reported before the next regular heartbeat, with its reason; the batch runs again in halves in a new process."""
    worker = await start_worker(backend="simulated:500", heartbeat_ms=2000)
    await worker.reaches("ready")
    ids = await batch(pool, "hello", "world")
    await eventually(lambda: running(pool, ids[0]), "the batch is claimed")
    lost = worker.model_pid
    assert lost is not None

    os.kill(lost, signal.SIGKILL)

    await worker.reaches("down", timeout_s=1.5)
    reported = "The model process was ended by signal 9."
    await eventually(lambda: reports(pool, reported), "the worker reports the end of its model", 1.5)
    results = await replies(pool, ids)
    assert [(r.output, r.batch_size, r.attempts) for r in results] == [("olleh", 1, 2), ("dlrow", 1, 2)]
    assert worker.model_pid not in {None, lost}


async def test_a_slow_worker_leaves_its_requests_to_others(
    pool: Pool, start_worker: StartWorker, faulty_models: Path
) -> None:
    """The trial at its start shows that the model is too slow, before any request; the process is not killed."""
    (faulty_models / "delay").write_text("0.6")
    slow = await start_worker("slow", "faulty_models:waits", gpu_timeout_ms=300, measure_at_start=True)
    view = await slow.reaches("slow")
    ids = await batch(pool, "hello")
    fast = await start_worker("fast", measure_at_start=True)
    (reply,) = await replies(pool, ids)

    async def measured() -> WorkerView | None:
        now = await slow.view()
        return now if now and now.model_ms >= 600 else None

    last = await eventually(measured, "the time of the model is reported")
    assert (view.healthy, view.timeout_ms, view.model_pid) == (False, 300, last.model_pid)
    assert (view.host, view.pid) == (socket.gethostname(), slow.process.pid)
    assert (reply.output, reply.worker_id, reply.attempts) == ("olleh", "fast", 1)
    assert 20 <= (await fast.reaches("ready")).model_ms < 300


@pytest.mark.parametrize("model", ["stumbles", "Stumbler"])
async def test_the_log_names_the_requests_at_which_the_model_failed(
    pool: Pool, start_worker: StartWorker, model: str
) -> None:
    """With the class of the exception, without its text; batches and slots."""
    worker = await start_worker(backend=f"faulty_models:{model}")
    await worker.reaches("ready")
    ids = await batch(pool, "bad", "hello")

    results = await replies(pool, ids)
    assert await worker.stop() == 0
    assert worker.process.stderr is not None
    log = (await worker.process.stderr.read()).decode()

    assert [(r.output, r.error_code) for r in results][1] == ("olleh", "")
    assert results[0].error_code == "poison_request"
    (line,) = [line for line in log.splitlines() if "the model failed at a request" in line]
    assert "The model raised KeyError." in line
    assert (ids[0] in line, ids[1] in line, "text of an input" in log) == (True, False, False)


@pytest.mark.parametrize(("model", "status"), [("Talker", "ready"), ("Blocker", "slow")])
async def test_with_slots_only_the_silence_of_a_model_counts(
    pool: Pool, start_worker: StartWorker, model: str, status: str
) -> None:
    """A request that takes twice the cap does not make a model slow that runs on; one that blocks for longer than the cap does."""
    worker = await start_worker(backend=f"faulty_models:{model}", gpu_timeout_ms=500, measure_at_start=True)

    view = await worker.reaches(status)

    assert (view.model_ms >= 500) == (status == "slow")


@pytest.fixture
async def proxy(redis_url: str) -> AsyncIterator[FaultProxy]:
    """A connection to Redis that can be cut."""
    proxy = FaultProxy("w1", Path(redis_url.removeprefix("unix://")))
    await proxy.start()
    yield proxy
    await proxy.stop()


@pytest.mark.parametrize("fault", ["stopped", "partitioned"])
async def test_late_worker_changes_nothing(
    pool: Pool, proxy: FaultProxy, start_worker: StartWorker, fault: str
) -> None:
    """Its lease ran out and another worker answered: its own result is dropped, there is one audit record, it goes on."""
    late = await start_worker("w1", "simulated:700", redis_url=f"redis://127.0.0.1:{proxy.port}")
    await late.reaches("ready")
    (request_id,) = await batch(pool, "hello")
    await eventually(lambda: running(pool, request_id), "the batch is claimed")
    await late.reaches("busy")
    cut = NetworkFault(drop_requests=True, drop_replies=True)
    with proxy.inject(cut) if fault == "partitioned" else nullcontext():
        if fault == "stopped":
            os.kill(late.process.pid, signal.SIGSTOP)
        other = await start_worker("w2", "simulated:50")
        await reap_until_answered(pool, request_id)
        before = await pool.results.fetch([request_id])
        if fault == "stopped":
            os.kill(late.process.pid, signal.SIGCONT)
    await other.stop()

    (later,) = await replies(pool, await batch(pool, "again"))
    assert (later.worker_id, later.output) == ("w1", "niaga")
    assert await pool.results.fetch([request_id]) == before
    assert before[0] is not None
    assert (before[0].output, before[0].worker_id, before[0].attempts) == ("olleh", "w2", 2)
    _, records = await pool.audit()
    assert sorted(record.id for record in records) == sorted([request_id, later.id])


async def test_sigterm_finishes_the_running_batch(pool: Pool, start_worker: StartWorker) -> None:
    """The worker drains, deregisters and exits with 0; a second batch stays in the queue."""
    worker = await start_worker(backend="simulated:800")
    ids = await batch(pool, "hello")
    await eventually(lambda: running(pool, ids[0]), "the batch is claimed")
    later = await batch(pool, "later")

    worker.process.send_signal(signal.SIGTERM)
    await worker.reaches("draining")

    assert await worker.process.wait() == 0
    assert await worker.view() is None
    assert [r.output for r in await replies(pool, ids)] == ["olleh"]
    assert (await pool.states(later), await pool.attempts(later[0])) == (["processing"], 0)
    assert await pool.pop() is not None


async def test_batch_that_outlasts_the_drain_is_handed_back_uncounted(pool: Pool, start_worker: StartWorker) -> None:
    """Its requests return to their tier queue."""
    worker = await start_worker(backend="simulated:2500", drain_ms=300)
    ids = await batch(pool, "hello", "world")
    await eventually(lambda: running(pool, ids[0]), "the batch is claimed")

    assert await worker.stop(signal.SIGINT) == 0

    assert (await pool.states(ids), await pool.depth("free")) == (["queued", "queued"], 2)
    assert [await pool.attempts(i) for i in ids] == [0, 0]
    assert await pool.inflight() == {}


async def test_the_drain_lasts_as_long_as_the_batch(pool: Pool, start_worker: StartWorker) -> None:
    """With the default time; the worker reports what is open until its end."""
    worker = await start_worker(backend="simulated:4500", gpu_timeout_ms=10_000)
    ids = await batch(pool, "hello")
    await eventually(lambda: running(pool, ids[0]), "the batch is claimed")

    worker.process.send_signal(signal.SIGTERM)

    assert (await worker.reaches("draining")).in_flight == 1
    assert [r.output for r in await replies(pool, ids)] == ["olleh"]
    assert await worker.process.wait() == 0


async def test_a_second_signal_ends_the_drain(pool: Pool, start_worker: StartWorker) -> None:
    """The batch is handed back, without an attempt."""
    worker = await start_worker(backend="simulated:30000", gpu_timeout_ms=60_000)
    ids = await batch(pool, "hello")
    await eventually(lambda: running(pool, ids[0]), "the batch is claimed")
    worker.process.send_signal(signal.SIGTERM)
    await worker.reaches("draining")

    assert await worker.stop() == 0

    assert (await pool.states(ids), await pool.attempts(ids[0])) == (["queued"], 0)


async def test_idle_worker_stops_at_once(pool: Pool, start_worker: StartWorker) -> None:
    """Its blocking pop is ended, and its model process too."""
    worker = await start_worker(drain_ms=60_000)
    await worker.reaches("ready")
    model_pid = worker.model_pid
    assert model_pid is not None

    async def blocked() -> bool:
        return int((await pool.client.info("clients"))["blocked_clients"]) == 1

    await eventually(blocked, "it waits in a pop")
    began = time.monotonic()

    assert await worker.stop() == 0

    assert time.monotonic() - began < BLOCK_S / 2
    assert not psutil.pid_exists(model_pid)


async def test_batch_popped_while_draining_is_pushed_back(pool: Pool, start_worker: StartWorker) -> None:
    """At once, without waiting for a lease."""
    worker = await start_worker()
    await worker.reaches("ready")
    async with pops_held(pool.client):
        worker.process.send_signal(signal.SIGTERM)
        await worker.reaches("draining")
        ids = await batch(pool, "hello")
        assert await worker.process.wait() == 0

    assert await pool.pop() is not None
    assert await pool.attempts(ids[0]) == 0


async def test_worker_whose_task_ends_exits_with_1(pool: Pool, redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not deregister, so that health shows the loss, and is restarted."""

    async def fails(_: Outgoing) -> None:
        raise ValueError

    monkeypatch.setattr(Outgoing, "run", fails)
    assert await run_worker(worker_config(redis_url, "w9", backend="simulated:20", device="cpu")) == 1

    assert [worker.id for worker in (await pool.presence.observe(TIERS)).workers] == ["w9"]


async def test_cordoned_worker_finishes_and_claims_nothing(pool: Pool, start_worker: StartWorker) -> None:
    """Within a second it is reported as cordoned and not counted; uncordoned, it claims what waited."""
    cordons = Cordons(pool.client, pool.keys)
    worker = await start_worker(backend="simulated:1500")
    await worker.reaches("ready")
    first = await batch(pool, "abc")
    await eventually(lambda: running(pool, first[0]), "the first batch runs")

    await cordons.write(["w1"])
    view = await worker.reaches("cordoned", timeout_s=1.0)
    assert (view.in_flight, view.healthy, await pool.presence.census()) == (1, False, (0, 1))
    assert [reply.output for reply in await replies(pool, first)] == ["cba"]
    second = await batch(pool, "def")

    async def idle() -> bool:
        (current,) = (await pool.presence.observe([])).workers
        return current.in_flight == 0 and current.age_ms < 200

    await eventually(idle, "a heartbeat without work")
    assert (await pool.attempts(second[0]), await pool.client.llen(pool.keys.batch_queue)) == (0, 1)
    await cordons.write([])
    assert [reply.output for reply in await replies(pool, second)] == ["fed"]


async def test_cordon_survives_restarts(pool: Pool, start_worker: StartWorker) -> None:
    """Of the worker, which is never ready in between, and of an empty Redis, as long as the worker knows of it."""
    cordons = Cordons(pool.client, pool.keys)
    await cordons.write(["w1"])
    waiting = await batch(pool, "abc")
    worker = await start_worker()
    await worker.reaches("cordoned")
    assert await pool.attempts(waiting[0]) == 0

    await pool.client.flushall()
    await pool.gateway_lives("g1")
    await worker.reaches("cordoned")
    await cordons.write(["w1"])
    await worker.reaches("cordoned")
    await cordons.write([])
    await worker.reaches("ready")
