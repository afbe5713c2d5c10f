"""Devices and models that fail in every way, through Redis: out of memory, sticky errors, nonsense, crash loops."""

import os
import signal
import time
from pathlib import Path

import pytest

from eventually import eventually
from gpu_pool.model_process import supervisor
from gpu_pool.worker.worker import Worker
from integration.gpu_pool_direct import DirectClient, StartHere, item, start_here, told
from integration.gpu_pool_fixtures import batch, ended, faulty_models, replies
from pool import Pool
from scheduler.protocol.pool_view import WorkerView
from scheduler.protocol.replies import Reply

__all__ = ["faulty_models", "start_here"]

TEXTS = ("one", "two", "bad", "four")


async def view(pool: Pool) -> WorkerView | None:
    return next(iter((await pool.presence.observe(["free"])).workers), None)


async def told_as(pool: Pool, status: str) -> WorkerView:
    """What health sees of the worker, once that is its status."""

    async def seen() -> WorkerView | None:
        found = await view(pool)
        return found if found and found.status == status else None

    return await eventually(seen, f"the worker is {status}", 30.0)


def pid(worker: Worker) -> int:
    assert worker._supervisor.model is not None
    return worker._supervisor.model.pid


async def answers(pool: Pool, *texts: str) -> list[Reply]:
    return await replies(pool, await batch(pool, *texts))


@pytest.mark.usefixtures("faulty_models")
async def test_out_of_memory_ends_nothing_and_lowers_the_measured_rate(
    pool: Pool, redis_url: str, start_here: StartHere
) -> None:
    """Three fit: 8 fail, 4 fail, then 2 at a time; the process lives, and full batches are told as four runs of 20 ms."""
    worker = await start_here("faulty_models:holds_three", redis_url=redis_url, max_batch_size=8)
    alive = pid(worker)
    for _ in range(20):
        worker._execution.service.record(8, 20.0)
    assert worker._execution.rate_rps == pytest.approx(400)

    for _ in range(3):
        found = await answers(pool, *"abcdefgh")
        assert [(r.output, r.error_code, r.attempts) for r in found] == [(text, "", 1) for text in "abcdefgh"]

    async def lowered() -> bool:
        found = await view(pool)
        return found is not None and 0 < found.rps < 120

    await eventually(lowered, "the heartbeat tells the lower rate")
    assert pid(worker) == alive


@pytest.mark.usefixtures("faulty_models")
async def test_members_of_a_batch_that_broke_the_device_run_apart(
    pool: Pool, redis_url: str, start_here: StartHere
) -> None:
    """A device-side assert ends the process; the others complete, and only the one that causes it ends as lost."""
    worker = await start_here("faulty_models:asserts_on_bad", redis_url=redis_url)
    first = pid(worker)

    one, two, bad, four = await answers(pool, *TEXTS)

    assert [(r.output, r.error_code) for r in (one, two, four)] == [("eno", ""), ("owt", ""), ("ruof", "")]
    assert (bad.state, bad.error_code, bad.attempts) == ("failed", "worker_lost", 3)
    assert one.attempts == two.attempts == 2  # Their half was done with.
    assert ended(first)
    assert [reply.output for reply in await answers(pool, "next")] == ["txen"]


async def test_whoever_kills_the_process_is_alone_in_the_end(
    pool: Pool, redis_url: str, start_here: StartHere, faulty_models: Path
) -> None:
    """The same where the process dies without a word, as by a segmentation fault."""
    await start_here("faulty_models:dies_on_bad", redis_url=redis_url)

    found = await answers(pool, *TEXTS)

    assert [reply.error_code for reply in found] == ["", "", "worker_lost", ""]
    assert (faulty_models / "deaths").read_text() == "4 2 1 "


async def test_a_model_that_answers_nonsense_is_put_aside(
    pool: Pool, redis_url: str, start_here: StartHere, faulty_models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three batches of NaN: no process, nothing claimed, and health says so; then one more is enough, until it heals."""
    monkeypatch.setattr(supervisor, "FIRST_QUARANTINE_S", 3.0)
    worker = await start_here("faulty_models:sick", redis_url=redis_url)
    first = pid(worker)
    (faulty_models / "sick").touch()

    for strike in range(3):
        assert worker._supervisor.status == "ready", strike
        assert [(r.error_code, r.attempts) for r in await answers(pool, "a", "b")] == [("invalid_output", 1)] * 2

    put_aside_at = time.monotonic()
    seen = await told_as(pool, "quarantined")
    assert not seen.healthy
    await eventually(lambda: ended(first), "the model process is gone")
    assert not worker._supervisor.ready.is_set()

    waiting = await batch(pool, "c")
    assert await pool.attempts(waiting[0]) == 0  # Nobody claimed it.
    assert [r.error_code for r in await replies(pool, waiting)] == ["invalid_output"]
    assert time.monotonic() - put_aside_at > 3.0
    await told_as(pool, "quarantined")  # On probation, one was enough.

    (faulty_models / "sick").unlink()
    assert [r.output for r in await answers(pool, "abc")] == ["cba"]
    assert (await told_as(pool, "ready")).healthy


async def test_nonsense_for_direct_calls_counts_the_same(
    start_here: StartHere, faulty_models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One model, one count, whichever way its batches come; a gateway is told to go elsewhere."""
    monkeypatch.setattr(supervisor, "FIRST_QUARANTINE_S", 0.7)
    worker = await start_here("faulty_models:sick")
    client = await DirectClient.welcomed(worker)
    (faulty_models / "sick").touch()

    for _ in range(3):
        assert told(await client.outcomes(item("a"))) == {"a": "invalid_output"}

    assert worker._status() == "quarantined"
    assert not hasattr(await client.ask(item("b")), "outcomes")


@pytest.mark.usefixtures("faulty_models")
async def test_a_model_that_never_loads_counts_as_failed(
    pool: Pool, redis_url: str, start_here: StartHere, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five failures, and the word in health changes; from then on it is tried rarely."""
    monkeypatch.setattr(supervisor, "FIRST_RESPAWN_S", 0.01)
    await start_here("faulty_models:DiesWhileLoading", redis_url=redis_url, loads=False)

    await told_as(pool, "down")
    seen = await told_as(pool, "failed")

    assert not seen.healthy


async def test_a_model_that_worked_is_back_at_once_however_often_it_is_killed(start_here: StartHere) -> None:
    """Twenty good batches between two kills: the delay before the next process stays at its first value."""
    worker = await start_here("simulated:0")
    client = await DirectClient.welcomed(worker)

    for _ in range(4):
        for _ in range(20):
            assert told(await client.outcomes(item("abc"))) == {"abc": "cba"}
        killed = pid(worker)
        os.kill(killed, signal.SIGKILL)
        await eventually(
            lambda killed=killed: worker._supervisor.model and pid(worker) != killed, "the next one is ready"
        )

        assert worker._supervisor._respawn._next_s == 2 * supervisor.FIRST_RESPAWN_S
