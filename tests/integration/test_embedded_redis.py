"""The embedded Redis: start, stop, what it keeps, and what an earlier run may have left."""

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from redis.asyncio import Redis

from eventually import eventually
from tierlane.embedded import EmbeddedRedis, EmbeddedServerError
from tierlane.embedded.process import MAX_SOCKET_PATH_BYTES
from tierlane.embedded.redis import NICE, find_jemalloc


async def test_it_answers_and_is_private(tmp_path: Path) -> None:
    """After start it answers, evicts nothing, has no TCP port, and only its owner can reach the socket."""
    server = EmbeddedRedis(tmp_path, tmp_path / "run", ephemeral=True)
    await server.start()
    async with Redis.from_url(server.url, decode_responses=True) as client:
        assert await client.ping()
        assert (await client.config_get("maxmemory-policy"))["maxmemory-policy"] == "noeviction"
        assert (await client.config_get("port"))["port"] == "0"
    assert stat.S_IMODE(server.socket.stat().st_mode) == 0o700
    assert stat.S_IMODE(server.socket.parent.stat().st_mode) == 0o700

    await server.stop()

    assert not psutil.pid_exists(server.pid)
    assert not server.socket.exists()


async def test_it_keeps_its_data_over_a_restart(tmp_path: Path) -> None:
    """What was written is there after stop and start."""
    server = EmbeddedRedis(tmp_path, tmp_path / "run")
    await server.start()
    async with Redis.from_url(server.url) as client:
        await client.set("kept", "1")
    await server.stop()
    await server.start()

    async with Redis.from_url(server.url) as client:
        assert await client.get("kept") == b"1"
    await server.stop()


async def test_an_ephemeral_one_keeps_nothing(tmp_path: Path) -> None:
    """Ephemeral: a restart is empty, and no data file was written."""
    server = EmbeddedRedis(tmp_path, tmp_path / "run", ephemeral=True)
    await server.start()
    async with Redis.from_url(server.url) as client:
        await client.set("lost", "1")
    await server.stop()
    await server.start()

    async with Redis.from_url(server.url) as client:
        assert await client.get("lost") is None
    await server.stop()
    assert not list((tmp_path / "redis").glob("*.aof*"))


async def test_it_starts_after_a_kill(tmp_path: Path) -> None:
    """A socket and a pid file that a killed server left are no obstacle."""
    server = EmbeddedRedis(tmp_path, tmp_path / "run")
    await server.start()
    os.kill(server.pid, signal.SIGKILL)
    await eventually(lambda: not server.alive, "the end of the server")

    await server.start()

    async with Redis.from_url(server.url) as client:
        assert await client.ping()
    await server.stop()


async def test_an_orphan_of_the_same_directory_is_replaced(tmp_path: Path) -> None:
    """A server that an earlier, killed launcher left running on our directory is stopped first."""
    orphan = EmbeddedRedis(tmp_path, tmp_path / "run")
    await orphan.start()
    server = EmbeddedRedis(tmp_path, tmp_path / "run")

    await server.start()

    assert not orphan.alive
    assert server.alive
    await server.stop()


async def test_a_reused_pid_is_not_killed(tmp_path: Path) -> None:
    """A pid file whose number now belongs to something else harms nobody."""
    other = EmbeddedRedis(tmp_path / "other", tmp_path / "other" / "run", ephemeral=True)
    await other.start()
    (tmp_path / "redis").mkdir()
    (tmp_path / "redis" / "redis.pid").write_text(f"{other.pid}\n")
    server = EmbeddedRedis(tmp_path, tmp_path / "run", ephemeral=True)

    await server.start()

    assert other.alive
    await server.stop()
    await other.stop()


async def test_a_long_path_gets_a_short_socket(tmp_path: Path) -> None:
    """Where the wanted socket path is too long to bind, a short private directory is used, the same each time."""
    deep = tmp_path / ("d" * 90)
    server = EmbeddedRedis(deep, deep / "run", ephemeral=True)
    again = EmbeddedRedis(deep, deep / "run", ephemeral=True)

    await server.start()

    assert len(os.fsencode(server.socket)) <= MAX_SOCKET_PATH_BYTES
    assert server.url == again.url
    assert stat.S_IMODE(server.socket.parent.stat().st_mode) == 0o700
    await server.stop()
    server.socket.parent.rmdir()


async def test_a_failed_start_shows_the_log(tmp_path: Path) -> None:
    """The error ends with what the server said, and nothing is left running."""
    server = EmbeddedRedis(tmp_path, tmp_path / "run", extra_args=("--no-such-option", "1"))

    with pytest.raises(EmbeddedServerError, match=r"(?s)Embedded Redis ended while starting.*no-such-option"):
        await server.start()

    assert not server.alive


async def test_a_server_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    """A stopped (SIGSTOP) server cannot react; stop ends it all the same."""
    server = EmbeddedRedis(tmp_path, tmp_path / "run", ephemeral=True)
    await server.start()
    os.kill(server.pid, signal.SIGSTOP)

    await server.stop(grace_s=0.2)

    assert not server.alive


@pytest.mark.skipif(sys.platform != "linux", reason="nothing is preloaded elsewhere")
async def test_it_uses_jemalloc_where_the_system_has_it(tmp_path: Path) -> None:
    """The library is in its memory exactly where one was found; without it the server runs all the same."""
    server = EmbeddedRedis(tmp_path, tmp_path / "run", ephemeral=True)
    await server.start()
    loaded = {Path(region.path).name.split(".")[0] for region in psutil.Process(server.pid).memory_maps()}
    await server.stop()

    assert ("libjemalloc" in loaded) is (find_jemalloc() is not None)


@pytest.mark.skipif(sys.platform != "linux", reason="sessions are weighed on Linux alone")
async def test_it_goes_before_others_where_that_is_allowed(tmp_path: Path) -> None:
    """Who may lower a nice value gives the server, and its session where the kernel weighs those, the right of way."""
    server = EmbeddedRedis(tmp_path, tmp_path / "run", ephemeral=True)
    await server.start()
    nice, session = psutil.Process(server.pid).nice(), _session_nice(server.pid)
    await server.stop()

    allowed = _may_lower_nice()
    assert nice == (NICE if allowed else psutil.Process().nice())
    assert session in (None, NICE if allowed else 0)


def _session_nice(pid: int) -> int | None:
    group = Path(f"/proc/{pid}/autogroup")
    return int(group.read_text().split()[-1]) if group.exists() else None


def _may_lower_nice() -> bool:
    with subprocess.Popen(["sleep", "60"]) as sleeper:
        try:
            os.setpriority(os.PRIO_PROCESS, sleeper.pid, NICE)
        except OSError:
            return False
        finally:
            sleeper.kill()
    return True
