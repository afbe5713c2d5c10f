"""`tierlane up` from its start to Ctrl-C: its port, stack.json, refused starts, remaining processes, and autoscaling."""

import io
import json
import os
import re
import signal
import socket
import stat
import struct
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from uuid import uuid4

import asyncpg
import psutil
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from configs import GONE_MS
from eventually import eventually
from ledger.postgres import asyncpg_dsn
from stack import free_port
from tierlane.connect import STACK_FILE
from tierlane_local.up.data_dir import DataDir, LogLines, StackError, held_port
from tierlane_local.up.leftovers import end_leftovers
from tierlane_local.up.members import body_dir
from tierlane_local.up.orphan_guard import LEASH_FILE, MARK_VARIABLE
from tierlane_local.up.readiness import Unready, wait_until_ready
from up_harness import RunningUp, running, working_in

Start = Callable[..., RunningUp]
HOST = "127.0.0.1"
IP_LOCAL_PORT_RANGE = 51  # Linux 6.3; Python's socket has no name for it.
Sleeper = Callable[[str], subprocess.Popen[bytes]]


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Start]:
    """Start stacks on the test's data directory; those that still run at its end are killed."""
    started: list[RunningUp] = []

    def run(*flags: str, port: int = 0, **options: Any) -> RunningUp:
        started.append(RunningUp(tmp_path / "data", port, *flags, **options))
        return started[-1]

    yield run
    for up in started:
        if up.process.poll() is None:
            up.process.kill()
            up.process.wait()
    await eventually(lambda: not working_in(tmp_path), "the end of every server", 3.0)


async def test_a_ready_stack_describes_itself_and_stops(tmp_path: Path, start: Start) -> None:
    """stack.json is private and complete, the output has prefixes and API keys, and Ctrl-C ends all within 5 s."""
    port = free_port()
    up = start("gateways=2", "workers=2", port=port)
    stack = await up.ready()
    await eventually(lambda: {"worker-1-model", "worker-2-model"} <= set(up.pids()), "the model processes")
    processes = up.all_processes()

    assert stat.S_IMODE((tmp_path / "data" / "stack.json").stat().st_mode) == 0o600
    assert set(stack) == {"http_url", "redis_url", "cells", "database_url", "service_token", "keys", "processes"}
    assert stack["cells"] == {"default": stack["redis_url"]}
    assert stack["http_url"] == f"http://127.0.0.1:{port}"
    assert stack["database_url"].startswith("postgresql+asyncpg://")
    assert set(stack["keys"]) == {"enterprise", "paid", "free"}
    assert [(entry["role"], entry["name"]) for entry in (up.stack() or {})["processes"]] == [
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
    await eventually(lambda: "gateway-1   | gateway listens" in up.text, "the gateway's output")
    lines = [
        *(f"Bearer {key}" for key in stack["keys"].values()),
        f"is ready: {stack['http_url']}, model simulated.",
        f"{stack['http_url']}/docs",
        "/internal/dashboard",
    ]
    await eventually(lambda: all(line in up.text for line in lines), "the description")
    assert stack["service_token"] not in up.text

    bodies = body_dir(tmp_path / "data")
    bodies.mkdir()  # As gateways do.
    assert await up.interrupt(within_s=5.0) == 0
    assert running(processes) == []
    assert up.stack() is None
    assert not bodies.exists()


async def test_a_stack_is_ready_once_each_gateway_sees_a_worker(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gateways share a port, so a connection reaches any of them, under the name of its process."""
    monkeypatch.setattr("tierlane_local.up.readiness.DISTRIBUTES", True)
    looks = [("gateway-1", 1), ("gateway-1", 1), ("gateway-2", 0), ("gateway-1", 1), ("gateway-2", 1)]

    async def ready(_: web.Request) -> web.Response:
        return web.Response()

    async def state(_: web.Request) -> web.Response:
        name, gpus = looks.pop(0)
        status = "healthy" if gpus else "down"
        document = {"gateway": f"{name}-{uuid4().hex}", "status": status, "healthy_gpus": gpus, "pools": []}
        return web.json_response(document)

    app = web.Application()
    app.add_routes([web.get("/readyz", ready), web.get("/internal/dashboard/events", state)])
    unready = Unready()
    async with TestServer(app) as server:
        url, names = str(server.make_url("")), ["gateway-1", "gateway-2"]
        await wait_until_ready(url, "token", [redis_url], ["default"], names, gone_ms=GONE_MS, unready=unready)

    assert looks == []
    assert (unready.gateways, list(unready.pools)) == (set(), [])


async def test_a_second_start_on_one_data_directory(start: Start) -> None:
    """It is refused while the first runs; afterwards it has the same keys and token.

    By default there are two gateways, one on a single core, and two schedulers.
    """

    def count(stack: dict[str, Any]) -> tuple[int, int]:
        roles = [process["role"] for process in stack["processes"]]
        return roles.count("gateway"), roles.count("scheduler")

    first = start("workers=1")
    before = await first.ready()
    refused = start("workers=1")
    assert await refused.ended(within_s=10.0) == 1
    assert f"Another `tierlane up` (pid {first.process.pid}) uses" in refused.text
    assert first.process.poll() is None
    await first.interrupt()
    later = start("workers=1", "gateways=1", "schedulers=0")
    after = await later.ready()
    await later.interrupt()

    assert (after["keys"], after["service_token"]) == (before["keys"], before["service_token"])
    assert (count(before), count(after)) == ((min(2, os.cpu_count() or 1), 2), (1, 0))


async def test_cells_have_servers_of_their_own(tmp_path: Path, start: Start) -> None:
    """A drained one stays drained. Workers start in the cells in turn. A cell is closed before its server is left out."""
    up = start("cells=3", "workers=4", "gateways=1", "schedulers=1")
    stack = await up.ready()
    urls = stack["cells"]
    workers = [psutil.Process(up.pids()[f"worker-{number}"]).environ() for number in (1, 2, 3, 4)]
    assert [worker["TIERLANE_REDIS_URL"] for worker in workers] == [*urls.values(), urls["default"]]
    assert [urls[cell].partition("#")[2] for cell in urls] == ["", "c2", "c3"]
    assert (tmp_path / "data" / "cells" / "c2" / "redis").is_dir()
    assert {"redis", "redis-c2", "redis-c3"} <= up.pids().keys()
    await change_cells(stack, "UPDATE cells SET state = 'draining' WHERE name = 'c2'")
    await up.interrupt()

    fewer = start("workers=1")
    assert await fewer.ended(within_s=30.0) == 1
    assert "Cells c2 and c3 of this data directory must be drained and closed first: start with --cells 3" in fewer.text
    again = start("cells=3", "workers=1", "gateways=1", "schedulers=1")
    stack = await again.ready()
    assert await change_cells(stack, "SELECT name, state FROM cells ORDER BY name") == [
        ("c2", "draining"), ("c3", "open"),
    ]  # fmt: skip
    await change_cells(stack, "UPDATE cells SET state = 'closed'")
    await again.interrupt()
    fewer = start("workers=1", "gateways=1", "schedulers=1")
    await fewer.ready()
    await fewer.interrupt()


async def change_cells(stack: dict[str, Any], query: str) -> list[tuple[Any, ...]]:
    connection = await asyncpg.connect(asyncpg_dsn(stack["database_url"]))
    try:
        return [tuple(row) for row in await connection.fetch(query)]
    finally:
        await connection.close()


@pytest.mark.parametrize("option", ["cells=2", "cluster=3"])
async def test_servers_are_not_started_beside_a_configured_redis(redis_url: str, start: Start, option: str) -> None:
    """Other machines could not reach them."""
    up = start(option, env={"TIERLANE_REDIS_URL": redis_url})
    assert await up.ended(within_s=30.0) == 1
    assert f"--{option[:-2]} starts servers, but TIERLANE_REDIS_URL is set: omit one of them." in up.text


async def test_a_port_in_use_is_refused_before_anything_starts(tmp_path: Path, start: Start) -> None:
    """The error names the port and the process, and no server has been created."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        up = start(port=port)
        assert await up.ended(within_s=10.0) == 1

    assert re.search(rf"Port {port} is in use on 127\.0\.0\.1 by .*, pid {os.getpid()}: stop", up.text)
    assert not (tmp_path / "data" / "postgres").exists()


async def test_an_ephemeral_stack_leaves_no_data(tmp_path: Path, start: Start) -> None:
    """The data of the servers is in a temporary directory, which is deleted."""

    def names(directory: Path) -> set[str]:
        return {path.name for path in directory.iterdir()} if directory.exists() else set()

    up = start("ephemeral=true")
    home = Path((await up.ready())["redis_url"].removeprefix("unix://")).parent.parent
    assert names(home) >= {"redis", "postgres"}
    await up.interrupt()

    assert names(home) == set()
    assert not names(tmp_path / "data") & {"redis", "postgres"}


async def test_a_start_that_takes_long_names_what_it_waits_for(tmp_path: Path, start: Start) -> None:
    """Every few seconds: the processes that are not ready, each with the last line that it printed."""
    unready = tmp_path / "unready"
    unready.touch()
    up = start(env={"STAND_IN_UNREADY": str(unready)})

    await eventually(lambda: "after 5 s, waiting for:" in up.text, "a report", 30.0)
    unready.unlink()
    await up.ready()

    assert re.search(r"  gateway-1, which last printed: gateway listens\n", up.text)


async def test_a_role_that_rejects_its_settings_ends_the_start(start: Start) -> None:
    """Exit code 2 of a role is not retried: its message is shown, and everything is stopped."""
    up = start(env={"STAND_IN_REFUSES": "1"})

    assert await up.ended(within_s=20.0) == 1

    assert re.search(r"scheduler-[12] \| TIERLANE_LEASE_MS: must be larger", up.text)
    assert re.search(r"scheduler-[12] does not run \(exit code 2\)", up.text)


@pytest.mark.parametrize(("interrupts", "within_s", "drain_ms"), [(1, 5.0, 1), (2, 2.0, 600_000)])
async def test_roles_that_ignore_sigterm_are_killed(
    start: Start, interrupts: int, within_s: float, drain_ms: int
) -> None:
    """After the time for open requests and a grace period, or at once with a second Ctrl-C."""
    up = start(f"drain_ms={drain_ms}", env={"STAND_IN_STUBBORN": "1"})
    await up.ready()
    processes = up.all_processes()
    for _ in range(interrupts - 1):
        up.process.send_signal(signal.SIGINT)
        await eventually(lambda: "again to kill everything now" in up.text, "the first Ctrl-C")

    assert await up.interrupt(within_s) == 0
    assert running(processes) == []


async def test_the_model_of_another_backend_is_disabled(tmp_path: Path, start: Start) -> None:
    """After a start with another backend only the new model is enabled."""
    for backend, size in (("simulated", 32), ("tiny", 8)):
        up = start(f"backend={backend}")
        stack = await up.ready()
        connection = await asyncpg.connect(stack["database_url"].replace("+asyncpg", ""))
        rows = await connection.fetch("SELECT name, max_batch_size FROM models WHERE enabled ORDER BY name")
        await connection.close()
        await up.interrupt()

        assert [tuple(row) for row in rows] == [(backend, size)]
    assert json.loads((tmp_path / "data" / "demo-models.json").read_text()) == {"models": ["simulated", "tiny"]}


async def test_workers_follow_the_autoscale_advice(tmp_path: Path, start: Start) -> None:
    """Within the bounds, the newest worker is removed first and not restarted; invalid advice changes nothing."""
    advice = tmp_path / "advice.json"

    def write(text: str) -> None:
        new = advice.with_suffix(".new")
        new.write_text(text)
        new.rename(advice)

    def advise(healthy: int, recommended: int) -> None:
        row = {"current_workers": healthy, "recommended_workers": recommended, "reason": "the test wants it"}
        write(json.dumps({"pools": {"default": row}}))

    def workers() -> list[str]:
        return sorted(name for name in up.pids() if re.fullmatch(r"worker-\d+", name))

    async def become(count: int) -> None:
        names = [f"worker-{n + 1}" for n in range(count)]
        await eventually(lambda: workers() == names, f"the workers {names}")

    advise(2, 2)
    up = start("workers=1", "autoscale=2:3", env={"STAND_IN_ADVICE": str(advice)})
    await up.ready()
    await become(2)
    before = up.pids()["worker-1"]
    advise(2, 3)
    await become(3)
    advise(3, 2)
    await become(2)
    for text in ("no json", "{}", '{"pools": {"default": {"current_workers": null}}}', "[]"):
        write(text)
        calls = up.text.count("was asked for advice")
        await eventually(lambda calls=calls: up.text.count("was asked for advice") >= calls + 2, "two more calls")
        assert len(workers()) == 2
    advise(2, 3)
    await become(3)

    assert up.pids()["worker-1"] == before
    assert "starting it again" not in up.text
    assert await up.interrupt(within_s=5.0) == 0


def server(port: int, *, shared: bool) -> socket.socket:
    """A socket that listens as those of asyncio and aiohttp do."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if shared:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        listener.bind((HOST, port))
        listener.listen()
    except OSError:
        listener.close()
        raise
    return listener


def test_only_gateways_can_listen_on_a_held_port() -> None:
    """They get all connections; without one clients are refused. Other servers and another stack cannot use the port."""
    with held_port(HOST, 0) as port:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((HOST, port), timeout=5)
        for _ in range(2):  # A gateway is restarted.
            with closing(server(port, shared=True)) as gateway:
                gateway.settimeout(5)
                for _ in range(20):
                    with socket.create_connection((HOST, port), timeout=5), gateway.accept()[0]:
                        pass
            with pytest.raises(OSError, match="in use"):
                server(port, shared=False)
        with pytest.raises(StackError, match=f"Port {port} is in use on {HOST}"), held_port(HOST, port):
            pass

    with closing(server(port, shared=False)):
        pass


@pytest.mark.parametrize(
    ("use", "error"),
    [
        (lambda other, _: other.bind((HOST, 0)), "in use"),
        (lambda other, port: other.connect((HOST, port)), "assign requested address"),
    ],
    ids=["server", "client"],
)
def test_the_kernel_assigns_a_held_port_to_nobody(use: Callable[[socket.socket, int], Any], error: str) -> None:
    """A regression: a worker could be given the port; a client that was given it connected to itself."""
    with held_port(HOST, 0) as port, socket.socket() as other:
        try:
            other.setsockopt(socket.IPPROTO_IP, IP_LOCAL_PORT_RANGE, struct.pack("=I", port << 16 | port))
        except OSError:
            pytest.skip("needs Linux 6.3")
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with pytest.raises(OSError, match=error):
            use(other, port)


@pytest.mark.parametrize("shared", [True, False])
def test_a_port_with_closed_connections_can_be_held(shared: bool) -> None:
    """Connections in TIME_WAIT of the last stack or of another server do not prevent a start."""
    with closing(server(0, shared=shared)) as last:
        port = last.getsockname()[1]
        with socket.create_connection((HOST, port), timeout=5) as client:
            last.accept()[0].close()
            assert client.recv(1) == b""

    with held_port(HOST, port) as same, closing(server(port, shared=True)):
        assert same == port


@pytest.fixture
def sleeper() -> Iterator[Sleeper]:
    """Start idle processes with a mark in their environment."""
    started: list[subprocess.Popen[bytes]] = []

    def start(mark: str) -> subprocess.Popen[bytes]:
        program = [sys.executable, "-c", "import time; print(flush=True); time.sleep(1000)"]
        process = subprocess.Popen(program, env=os.environ | {MARK_VARIABLE: mark}, stdout=subprocess.PIPE)
        assert process.stdout is not None
        process.stdout.readline()  # Its environment is set.
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def data_dir(tmp_path: Path) -> Iterator[DataDir]:
    """A directory whose stack with the mark `ours` was killed with its orphan guard."""
    data_dir = DataDir(tmp_path / "data")
    data_dir.write_json(LEASH_FILE, {"mark": "ours", "lines": []})
    yield data_dir
    data_dir.release()


def end(data_dir: DataDir, *, replace: bool = False, answer: bool = False) -> str:
    """End remaining processes; returns the questions and the output."""
    questions: list[str] = []
    stream = io.BytesIO()

    def ask(question: str) -> bool:
        questions.append(question)
        return answer

    end_leftovers(data_dir, LogLines(stream, coloured=False), replace=replace, ask=ask)
    return "".join(questions) + stream.getvalue().decode()


@pytest.mark.parametrize("content", ["", "\n", " " * 40, "short\n"])
def test_a_service_token_that_was_cut_off_is_replaced(data_dir: DataDir, content: str) -> None:
    """As after a full disk; a whole one stays."""
    (data_dir.path / "service-token").write_text(content)
    token = data_dir.service_token()

    assert len(token) > 40
    assert data_dir.service_token() == token


def test_remaining_processes_are_ended_after_a_confirmation(data_dir: DataDir, sleeper: Sleeper) -> None:
    """They are named as in stack.json, and the others counted; without a confirmation they keep running."""
    known, unknown = sleeper("ours"), sleeper("ours")
    entries = [{"role": "gateway", "name": "gateway", "pid": known.pid}, {"role": "x", "name": "scheduler", "pid": 1}]
    data_dir.write_json(STACK_FILE, {"processes": entries})
    names = f"gateway (pid {known.pid}), 1 more of an earlier `tierlane up` on {data_dir.path} still run"

    with pytest.raises(StackError) as error:
        end(data_dir)
    assert str(error.value).startswith(f"{names}: ")
    assert (known.poll(), unknown.poll()) == (None, None)

    assert f"{names}. End them? [y/N] " in end(data_dir, answer=True)
    assert (known.wait(5), unknown.wait(5)) == (-9, -9)


def test_remaining_processes_are_ended_with_replace(data_dir: DataDir, sleeper: Sleeper) -> None:
    """No question is asked; a process that only has the pid of an entry in stack.json is not ended."""
    process, other = sleeper("ours"), sleeper("another")
    data_dir.write_json(STACK_FILE, {"processes": [{"role": "gateway", "name": "gateway", "pid": other.pid}]})

    assert "[y/N]" not in end(data_dir, replace=True)

    assert process.wait(5) == -9
    assert other.poll() is None


def test_a_directory_without_a_killed_stack(tmp_path: Path, sleeper: Sleeper) -> None:
    """Nothing is ended; an empty mark does not match every process without one."""
    process = sleeper("")
    data_dir = DataDir(tmp_path / "fresh")

    assert end(data_dir, replace=True) == ""

    data_dir.release()
    assert process.poll() is None
