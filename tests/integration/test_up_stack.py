"""`tierlane up` from start to Ctrl-C: what it writes, what it prints, whom it refuses."""

import json
import os
import re
import signal
import socket
import stat
from collections.abc import AsyncIterator
from pathlib import Path

import asyncpg
import pytest

from eventually import eventually
from up_harness import RunningUp, free_port, running, working_in


@pytest.fixture
async def stacks(tmp_path: Path) -> AsyncIterator[list[RunningUp]]:
    """A list for the stacks of a test; what still runs at its end is killed."""
    started: list[RunningUp] = []
    yield started
    for up in started:
        if up.process.poll() is None:
            up.process.kill()
            up.process.wait()
    await eventually(lambda: not working_in(tmp_path), "the end of every server", 3.0)


async def test_a_ready_stack_describes_itself_and_stops_cleanly(tmp_path: Path, stacks: list[RunningUp]) -> None:
    """stack.json is private and complete, lines are prefixed, a curl is shown, Ctrl-C ends all within 5 s with 0."""
    port = free_port()
    up = RunningUp(tmp_path / "data", port, "gateways=2", "workers=2")
    stacks.append(up)

    stack = await up.ready()
    models = {"worker-1-model", "worker-2-model"}
    await eventually(lambda: models <= set(up.pids()), "the model processes in stack.json")
    processes = up.all_processes()
    names = [(entry["role"], entry["name"]) for entry in (up.stack() or {})["processes"]]

    assert stat.S_IMODE((tmp_path / "data" / "stack.json").stat().st_mode) == 0o600
    assert set(stack) == {"http_url", "redis_url", "database_url", "service_token", "keys", "processes"}
    assert stack["http_url"] == f"http://127.0.0.1:{port}"
    assert stack["database_url"].startswith("postgresql+asyncpg://")
    assert set(stack["keys"]) == {"enterprise", "paid", "free"}
    assert names == [
        ("redis", "redis"),
        ("postgres", "postgres"),
        ("scheduler", "scheduler-1"),
        ("scheduler", "scheduler-2"),
        ("worker", "worker-1"),
        ("model", "worker-1-model"),
        ("worker", "worker-2"),
        ("model", "worker-2-model"),
        ("gateway", "gateway-1"),
        ("gateway", "gateway-2"),
    ]
    await eventually(lambda: "gateway-1   | gateway listens" in up.text, "what the gateway says reaches the terminal")
    assert all(f"Bearer {key}" in up.text for key in stack["keys"].values())
    assert stack["service_token"] not in up.text

    assert await up.interrupt(within_s=5.0) == 0

    assert running(processes) == []
    assert up.stack() is None


async def test_a_single_crash_takes_no_role_away(tmp_path: Path, stacks: list[RunningUp]) -> None:
    """By default there are two gateways (one on a single core) and two schedulers; both numbers can be chosen."""
    for flags, gateways, schedulers in [((), min(2, os.cpu_count() or 1), 2), (("gateways=1", "schedulers=0"), 1, 0)]:
        up = RunningUp(tmp_path / "data", 0, "workers=1", *flags)
        stacks.append(up)
        roles = [process["role"] for process in (await up.ready())["processes"]]
        await up.interrupt()

        assert (roles.count("gateway"), roles.count("scheduler")) == (gateways, schedulers)


async def test_a_later_start_has_the_same_keys_and_token(tmp_path: Path, stacks: list[RunningUp]) -> None:
    """Keys, token and data are those of the first start."""
    first = RunningUp(tmp_path / "data", 0)
    stacks.append(first)
    before = await first.ready()
    await first.interrupt()
    second = RunningUp(tmp_path / "data", 0)
    stacks.append(second)

    after = await second.ready()

    assert after["keys"] == before["keys"]
    assert after["service_token"] == before["service_token"]
    await second.interrupt()


async def test_a_second_up_on_one_data_dir_is_refused(tmp_path: Path, stacks: list[RunningUp]) -> None:
    """The second says who has the directory and exits with 1; the first is not disturbed."""
    first = RunningUp(tmp_path / "data", 0)
    stacks.append(first)
    await first.ready()
    second = RunningUp(tmp_path / "data", 0)
    stacks.append(second)

    assert await second.ended(within_s=10.0) == 1

    assert f"Another `tierlane up` (pid {first.process.pid}) uses" in second.text
    assert first.process.poll() is None
    await first.interrupt()


async def test_a_port_in_use_is_refused_before_anything_starts(tmp_path: Path, stacks: list[RunningUp]) -> None:
    """The sentence names the port, and no server has been set up."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        up = RunningUp(tmp_path / "data", port)
        stacks.append(up)

        assert await up.ended(within_s=10.0) == 1

    assert re.search(rf"Port {port} is in use on 127\.0\.0\.1 by .*, pid {os.getpid()}: stop", up.text)
    assert not (tmp_path / "data" / "postgres").exists()


async def test_an_ephemeral_stack_leaves_only_small_files(tmp_path: Path, stacks: list[RunningUp]) -> None:
    """Server data is in a temporary directory that is gone at the end; stack.json is in the data directory."""
    up = RunningUp(tmp_path / "data", 0, "ephemeral=true")
    stacks.append(up)
    stack = await up.ready()
    home = Path(stack["redis_url"].removeprefix("unix://")).parent.parent
    assert _kept(home) >= {"redis", "postgres"}

    await up.interrupt()

    assert _kept(home) == set()
    assert not _kept(tmp_path / "data") & {"redis", "postgres"}


def _kept(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()} if directory.exists() else set()


async def test_a_role_that_refuses_its_settings_ends_the_start(tmp_path: Path, stacks: list[RunningUp]) -> None:
    """Exit code 2 of a role is not retried: its message is shown and all is stopped."""
    up = RunningUp(tmp_path / "data", 0, env={"STAND_IN_REFUSES": "1"})
    stacks.append(up)

    assert await up.ended(within_s=20.0) == 1

    assert re.search(r"scheduler-[12] \| TIERLANE_LEASE_MS: must be larger", up.text)
    assert re.search(r"scheduler-[12] does not run \(exit code 2\)", up.text)


async def test_roles_that_ignore_sigterm_do_not_delay_ctrl_c(tmp_path: Path, stacks: list[RunningUp]) -> None:
    """Hanging gateways, workers and schedulers are killed, and the whole still ends within 5 s."""
    up = RunningUp(tmp_path / "data", 0, env={"STAND_IN_STUBBORN": "1"})
    stacks.append(up)
    await up.ready()
    processes = up.all_processes()

    assert await up.interrupt(within_s=5.0) == 0

    assert running(processes) == []


async def test_a_second_ctrl_c_kills_at_once(tmp_path: Path, stacks: list[RunningUp]) -> None:
    """Who is impatient does not wait for the grace of hanging roles."""
    up = RunningUp(tmp_path / "data", 0, env={"STAND_IN_STUBBORN": "1"})
    stacks.append(up)
    await up.ready()
    processes = up.all_processes()
    up.process.send_signal(signal.SIGINT)
    await eventually(lambda: "again to kill at once" in up.text, "the first Ctrl-C")

    up.process.send_signal(signal.SIGINT)

    assert await up.ended(within_s=2.0) == 0
    assert running(processes) == []


async def test_a_model_of_another_backend_is_disabled(tmp_path: Path, stacks: list[RunningUp]) -> None:
    """After a start with another backend, only the new model is enabled."""
    for backend in ("simulated", "tiny"):
        up = RunningUp(tmp_path / "data", 0, f"backend={backend}")
        stacks.append(up)
        stack = await up.ready()
        connection = await asyncpg.connect(stack["database_url"].replace("+asyncpg", ""))
        rows = await connection.fetch("SELECT name, max_batch_size FROM models WHERE enabled ORDER BY name")
        await connection.close()
        await up.interrupt()

        assert [tuple(row) for row in rows] == [(backend, {"tiny": 8, "simulated": 32}[backend])]
    assert json.loads((tmp_path / "data" / "demo-models.json").read_text()) == {"models": ["simulated", "tiny"]}
