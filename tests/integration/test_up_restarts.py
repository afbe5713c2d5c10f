"""What dies is started again, with backoff, and stack.json says so; what is killed leaves no orphan."""

import os
import re
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from eventually import eventually
from tierlane.up.supervisor import SERVED_S
from up_harness import RunningUp, running, working_in


@pytest.fixture
async def up(tmp_path: Path) -> AsyncIterator[RunningUp]:
    """A ready stack with one worker."""
    stack = RunningUp(tmp_path / "data", 0, "workers=1")
    await stack.ready()
    await eventually(lambda: "worker-1-model" in stack.pids(), "the model process")
    yield stack
    if stack.process.poll() is None:
        stack.process.kill()
    stack.process.wait()
    await eventually(lambda: not working_in(tmp_path), "the end of every server", 3.0)


@pytest.mark.parametrize("name", ["redis", "postgres", "worker-1", "gateway-1", "scheduler-1"])
async def test_a_killed_process_is_back_under_its_name(up: RunningUp, name: str) -> None:
    """SIGKILL of any process: soon another one has its name in stack.json, and the others are as before."""
    before = up.pids()
    await all_served()

    os.kill(before[name], signal.SIGKILL)

    after = await eventually(lambda: up.pids().get(name, before[name]) != before[name] and up.pids(), f"a new {name}")
    others = set(before) - {name, "worker-1-model"}
    assert {other: after[other] for other in others} == {other: before[other] for other in others}
    assert f"{name} ended (signal 9); starting it again now" in up.text


async def all_served() -> None:
    """Every process that runs now has lived for as long as counts as having served."""
    begun = time.monotonic()
    await eventually(lambda: time.monotonic() - begun > SERVED_S, "it served for a while")


async def test_the_model_of_a_new_worker_is_written_down(up: RunningUp) -> None:
    """The model's entry follows its worker."""
    before = up.pids()

    os.kill(before["worker-1"], signal.SIGKILL)

    await eventually(
        lambda: up.pids().get("worker-1-model", before["worker-1-model"]) != before["worker-1-model"], "a new model"
    )


async def test_repeated_deaths_right_after_the_start_are_restarted_ever_later(up: RunningUp) -> None:
    """The delays double for who never lives long enough to serve, and start over for who did."""
    await all_served()
    for _ in range(4):
        pid = up.pids()["scheduler-1"]
        os.kill(pid, signal.SIGKILL)
        await eventually(lambda pid=pid: up.pids().get("scheduler-1", pid) != pid, "a new scheduler")

    delays = re.findall(r"scheduler-1 ended \(signal 9\); starting it again (now|in [0-9.]+ s)", up.text)
    assert delays == ["now", "in 0.2 s", "in 0.4 s", "in 0.8 s"]


async def test_nothing_survives_a_killed_up(up: RunningUp) -> None:
    """SIGKILL of `up` alone: within 3 s every process is gone, the leash and an orphaned model too."""
    orphan = psutil.Process(up.pids()["worker-1-model"])
    os.kill(up.pids()["worker-1"], signal.SIGKILL)
    assert orphan.is_running()
    processes = [*up.all_processes(), orphan]

    up.process.kill()
    up.process.wait()

    await eventually(lambda: not running(processes), f"the end of {processes}", 3.0)


@pytest.mark.parametrize("name", ["redis", "postgres"])
async def test_a_server_that_is_just_starting_does_not_survive_either(up: RunningUp, name: str) -> None:
    """`up` is killed while it brings a server back: before it could name the new process to the leash."""
    before = up.pids()[name]
    os.kill(before, signal.SIGKILL)
    workdir = up.data_dir / name
    await eventually(lambda: set(working_in(workdir)) - {before}, "the new server's process")

    up.process.kill()
    up.process.wait()

    await eventually(lambda: not working_in(workdir), "the end of the new server", 3.0)


async def test_a_killed_leash_is_replaced(up: RunningUp) -> None:
    """Even when somebody killed the leash first, SIGKILL of `up` leaves nothing."""
    leash = _leash(up)
    leash.kill()
    await eventually(lambda: _leash(up) != leash and _leash(up), "another leash")
    processes = up.all_processes()

    up.process.kill()
    up.process.wait()

    await eventually(lambda: not running(processes), f"the end of {processes}", 3.0)


async def test_up_and_leash_killed_together_leave_what_the_next_up_names(up: RunningUp) -> None:
    """The kernel ends every process that `up` started itself; what those had started is named, and ended with --replace."""
    model = psutil.Process(up.pids()["worker-1-model"])
    started = [each for each in up.all_processes() if each.pid != model.pid]
    leash = _leash(up)
    assert leash is not None

    leash.kill()
    up.process.kill()
    up.process.wait()

    await eventually(lambda: not running(started), f"the end of {started}", 3.0)
    assert running([model])
    refused = RunningUp(up.data_dir, 0, "workers=1")
    assert await refused.ended(within_s=10.0) == 1
    named = f"worker-1-model (pid {model.pid}) of an earlier `tierlane up` on {up.data_dir} still run"
    assert f"cannot start: {named}: end them with `tierlane up --replace`" in refused.text
    assert running([model])

    again = RunningUp(up.data_dir, 0, "workers=1", "replace=true")
    try:
        await eventually(lambda: not running([model]), "it is ended")
        await eventually(lambda: again.text.count("ready in") == 2, "the new stack is ready", 30.0)
        assert await again.interrupt() == 0
    finally:
        again.process.kill()
        again.process.wait()


async def test_a_start_right_after_a_kill_works_on_the_same_data(up: RunningUp) -> None:
    """The next `up` waits until the leash has cleared away, recovers the servers' data, and has the same keys."""
    before = up.stack() or {}
    up.process.kill()
    up.process.wait()
    (up.data_dir / "stack.json").unlink()

    again = RunningUp(up.data_dir, 0, "workers=1")

    try:
        assert (await again.ready())["keys"] == before["keys"]
        assert await again.interrupt() == 0
    finally:
        again.process.kill()
        again.process.wait()


@pytest.mark.parametrize("delay_s", [0.15, 0.5, 1.0])
async def test_a_kill_during_the_start_leaves_nothing(tmp_path: Path, delay_s: float) -> None:
    """At whatever moment of the start `up` is killed, its processes go with it."""
    up = RunningUp(tmp_path / "data", 0)
    begun = time.monotonic()
    await eventually(lambda: time.monotonic() - begun > delay_s, "the moment of the kill")
    processes = up.all_processes()

    up.process.kill()
    up.process.wait()

    await eventually(lambda: not running(processes), f"the end of {processes}", 3.0)
    await eventually(lambda: not working_in(tmp_path), "no process works in the data directory", 3.0)


def _leash(up: RunningUp) -> psutil.Process | None:
    for child in psutil.Process(up.process.pid).children():
        try:
            if "tierlane.up.orphan_guard" in child.cmdline():
                return child
        except psutil.NoSuchProcess:
            continue  # Killed; a zombie until `up` has reaped it.
    return None
