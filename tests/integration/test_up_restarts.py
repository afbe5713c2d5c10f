"""`tierlane up` restarts what dies, with backoff, and leaves no orphan when it is killed itself."""

import os
import re
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from eventually import eventually
from tierlane_local.up.restart_backoff import SERVED_S
from up_harness import RunningUp, running, working_in

MODEL = "worker-1-model"


@pytest.fixture
async def up(tmp_path: Path) -> AsyncIterator[RunningUp]:
    """A ready stack with one worker."""
    stack = RunningUp(tmp_path / "data", 0, "workers=1")
    await stack.ready()
    await eventually(lambda: MODEL in stack.pids(), "the model process")
    yield stack
    kill(stack)
    await eventually(lambda: not working_in(tmp_path), "the end of every server", 3.0)


def kill(up: RunningUp) -> None:
    up.process.kill()
    up.process.wait()


async def all_gone(processes: list[psutil.Process]) -> None:
    await eventually(lambda: not running(processes), f"the end of {processes}", 3.0)


async def served() -> None:
    """Wait until every process has run long enough to be restarted at once."""
    begun = time.monotonic()
    await eventually(lambda: time.monotonic() - begun > SERVED_S, "every process has served")


async def restarted(up: RunningUp, name: str) -> dict[str, int]:
    """Kill a process, and wait until another one has its name in stack.json."""
    before = up.pids()[name]
    os.kill(before, signal.SIGKILL)
    return await eventually(lambda: up.pids().get(name, before) != before and up.pids(), f"a new {name}")


def orphan_guard(up: RunningUp) -> psutil.Process | None:
    for child in psutil.Process(up.process.pid).children():
        try:
            if "tierlane_local.up.orphan_guard" in child.cmdline():
                return child
        except psutil.NoSuchProcess:
            continue  # Killed; a zombie until `up` has reaped it.
    return None


async def test_each_killed_process_is_restarted(up: RunningUp) -> None:
    """At once, under its name in stack.json; the others keep running. The entry of a model follows its worker."""
    await served()
    for name in ("redis", "postgres", "gateway-1", "scheduler-1", "worker-1"):
        before = up.pids()
        after = await restarted(up, name)
        others = set(before) - {name, MODEL}
        assert {other: after[other] for other in others} == {other: before[other] for other in others}
        assert f"{name} ended (signal 9); starting it again now" in up.text
    await eventually(lambda: up.pids().get(MODEL, before[MODEL]) != before[MODEL], "a new model")


async def test_repeated_crashes_are_restarted_with_backoff(up: RunningUp) -> None:
    """The delay doubles for a process that never served."""
    await served()
    for _ in range(4):
        await restarted(up, "scheduler-1")

    delays = re.findall(r"scheduler-1 ended \(signal 9\); starting it again (now|in [0-9.]+ s)", up.text)
    assert delays == ["now", "in 0.2 s", "in 0.4 s", "in 0.8 s"]


async def test_no_process_survives_a_killed_up(up: RunningUp) -> None:
    """Every process is gone within three seconds, also an orphaned model; a start right after it has the same keys."""
    before = up.stack() or {}
    orphan = psutil.Process(up.pids()[MODEL])
    os.kill(up.pids()["worker-1"], signal.SIGKILL)
    assert orphan.is_running()
    processes = [*up.all_processes(), orphan]
    kill(up)
    (up.data_dir / "stack.json").unlink()
    again = RunningUp(up.data_dir, 0, "workers=1")
    try:
        await all_gone(processes)
        assert (await again.ready())["keys"] == before["keys"]
        assert await again.interrupt() == 0
    finally:
        kill(again)


@pytest.mark.parametrize("name", ["redis", "postgres"])
async def test_a_server_that_is_starting_does_not_survive_a_killed_up(up: RunningUp, name: str) -> None:
    """`up` is killed before it could register the new process with the orphan guard."""
    before = up.pids()[name]
    os.kill(before, signal.SIGKILL)
    directory = up.data_dir / name
    await eventually(lambda: set(working_in(directory)) - {before}, "the new server's process")
    kill(up)

    await eventually(lambda: not working_in(directory), "the end of the new server", 3.0)


async def test_a_killed_orphan_guard_is_replaced(up: RunningUp) -> None:
    """The new one ends every process after a kill of `up`."""
    guard = orphan_guard(up)
    assert guard is not None
    guard.kill()
    await eventually(lambda: orphan_guard(up) != guard and orphan_guard(up), "another orphan guard")
    processes = up.all_processes()
    kill(up)

    await all_gone(processes)


async def test_up_and_its_orphan_guard_killed_together(up: RunningUp) -> None:
    """The kernel ends the processes that `up` started; those that they started are named by the next `up`.

    It ends them with --replace.
    """
    model = psutil.Process(up.pids()[MODEL])
    children = [each for each in up.all_processes() if each.pid != model.pid]
    guard = orphan_guard(up)
    assert guard is not None
    guard.kill()
    kill(up)
    await all_gone(children)

    refused = RunningUp(up.data_dir, 0, "workers=1")
    assert await refused.ended(within_s=10.0) == 1
    assert f"cannot start: {MODEL} (pid {model.pid}) of an earlier `tierlane up`" in refused.text
    assert running([model])

    again = RunningUp(up.data_dir, 0, "workers=1", "replace=true")
    try:
        await all_gone([model])
        await eventually(lambda: again.text.count("ready in") == 2, "the new stack is ready", 30.0)
        assert await again.interrupt() == 0
    finally:
        kill(again)


@pytest.mark.parametrize("delay_s", [0.15, 0.5, 1.0])
async def test_a_kill_during_the_start_leaves_no_process(tmp_path: Path, delay_s: float) -> None:
    """At any moment of the start."""
    up = RunningUp(tmp_path / "data", 0)
    begun = time.monotonic()
    await eventually(lambda: time.monotonic() - begun > delay_s, "the moment of the kill")
    processes = up.all_processes()
    kill(up)

    await all_gone(processes)
    await eventually(lambda: not working_in(tmp_path), "no process works in the data directory", 3.0)
