"""Stacks with Redis as platform engineers have it: Sentinels with logins and TLS, and far away."""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from certificates import certificates
from delay_proxy import far_away
from eventually import eventually
from guarded_redis import GuardedRedis
from load import ALL_WELL, load, one_row_each, unwell, verdict
from stack import Stack, start_stack
from tierlane_local.embedded.redis import EmbeddedRedis

pytestmark = [pytest.mark.surroundings, pytest.mark.timeout(180)]

OPTIONS = ("--backend", "simulated:50", "--workers", "4")
TIERS = ("enterprise", "paid", "free")
RATE = 40.0


@pytest.fixture
def debian_redis() -> Path:
    """Debian's server, which has TLS; that of the wheel has none."""
    found = shutil.which("redis-server")
    assert found is not None, "redis-server is not installed (on Debian: apt-get install redis-server)"
    return Path(found)


def checked(stack: Stack, redis_url: str) -> dict[str, Any]:
    """The lines of `tierlane check` for Redis, by name."""
    environment = stack.role_environment() | {"TIERLANE_REDIS_URL": redis_url}
    command = [sys.executable, "-m", "tierlane", "check", "--output", "json", "--url", stack.url]
    found = subprocess.run(command, env=environment, capture_output=True, check=False, timeout=60)
    return {item["name"]: item for item in json.loads(found.stdout)["checks"] if item["group"] == "redis"}


@pytest.mark.parametrize("tls", [False, True], ids=["passwords", "tls-and-users"])
async def test_a_failover_of_sentinels_with_logins(tls: bool, tmp_path: Path, debian_redis: Path) -> None:
    """The primary is killed under a light load: every request is completed and has one row."""
    servers = GuardedRedis(tmp_path, debian_redis, certificates(tmp_path) if tls else None)
    try:
        await servers.start()
        with start_stack(tmp_path / "stack", *OPTIONS, environment={"TIERLANE_REDIS_URL": servers.url}) as stack:
            await stack.healthy(4)
            assert {item["level"] for item in checked(stack, servers.url).values()} == {"pass"}
            loading = asyncio.create_task(load(stack, RATE, 10.0, TIERS))
            await asyncio.sleep(2.0)
            servers.kill_primary()
            answers = await loading

            assert verdict(answers) == ALL_WELL
            await one_row_each(stack, answers)
            await stack.healthy(4)
    finally:
        servers.stop()


@pytest.fixture
def socket(tmp_path: Path) -> Iterator[Path]:
    """The socket of an embedded server."""
    server = EmbeddedRedis(tmp_path, tmp_path / "socket", ephemeral=True)
    asyncio.run(server.start())
    yield Path(server.url.removeprefix("unix://"))
    asyncio.run(server.stop())


@pytest.mark.parametrize(("round_trip_ms", "level"), [(5, "pass"), (20, "pass"), (60, "warn"), (120, "warn")], ids=str)
def test_roles_start_and_serve_far_from_redis(round_trip_ms: int, level: str, socket: Path, tmp_path: Path) -> None:
    """Every request has its response and one row; `check` and health name the distance."""
    with far_away(socket, round_trip_ms / 1000) as port:
        url = f"redis://127.0.0.1:{port}/0"
        with start_stack(tmp_path / "stack", *OPTIONS, environment={"TIERLANE_REDIS_URL": url}) as stack:
            asyncio.run(served(stack))
            found = checked(stack, url)["distance"]
            health = asyncio.run(stack.health())["checks"]["redis:round_trip"][0]

    assert found["level"] == level
    for measured_ms in (float(found["said"].split()[-2]), health["observedValue"]):
        assert round_trip_ms <= measured_ms <= round_trip_ms + 15
    assert health["status"] == "pass"


async def served(stack: Stack) -> None:
    """A light load, steady for some seconds, and then with a worker killed twice."""
    await stack.healthy(4)
    for killing in (steady, worker_killed):
        faults = asyncio.create_task(killing(stack))
        answers = await load(stack, RATE, 6.0, TIERS, done=faults.done)
        await faults

        assert verdict(answers) == ALL_WELL, (killing.__name__, unwell(answers)[:3])
        await one_row_each(stack, answers)


async def steady(stack: Stack) -> None:
    """No fault."""


async def worker_killed(stack: Stack) -> None:
    """Each kill waits for all GPUs."""
    for name in ("worker-1", "worker-2"):
        await asyncio.sleep(2.0)
        killed = stack.pids("worker")[name]
        os.kill(killed, signal.SIGKILL)
        await eventually(
            lambda old=killed, of=name: stack.pids("worker").get(of) not in (None, old), "it restarts", 20.0
        )
        await stack.healthy(4, 30.0)


def test_beyond_the_bound_check_fails_and_health_warns(socket: Path, tmp_path: Path) -> None:
    """Both name the measured round trip."""
    with far_away(socket, 0.2) as port:
        url = f"redis://127.0.0.1:{port}/0"
        with start_stack(tmp_path / "stack", *OPTIONS, environment={"TIERLANE_REDIS_URL": url}) as stack:
            found = checked(stack, url)["distance"]
            health = asyncio.run(stack.health())["checks"]["redis:round_trip"][0]

    assert found["level"] == "fail"
    assert health["status"] == "warn"
    assert "150 ms" in health["output"]
