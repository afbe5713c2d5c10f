"""The embedded PostgreSQL: start, stop, durability, and what an earlier run may have left."""

import asyncio
import os
import signal
import stat
from collections.abc import AsyncIterator
from pathlib import Path

import asyncpg
import psutil
import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import create_async_engine

from eventually import eventually
from tierlane.child_process import family, kill_all
from tierlane.embedded import EmbeddedPostgres, EmbeddedServerError
from tierlane.embedded.process import UNPRIVILEGED_ID


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[EmbeddedPostgres]:
    """A running ephemeral server."""
    server = EmbeddedPostgres(tmp_path, tmp_path / "run", ephemeral=True)
    await server.start()
    yield server
    await server.stop()


async def _setting(server: EmbeddedPostgres, name: str) -> str:
    connection = await asyncpg.connect(server.dsn)
    try:
        return str(await connection.fetchval("SELECT current_setting($1)", name))
    finally:
        await connection.close()


async def test_both_urls_lead_to_the_database(server: EmbeddedPostgres) -> None:
    """SQLAlchemy takes `url`, asyncpg takes `dsn`, and both end in the database tierlane."""
    engine = create_async_engine(server.url)
    async with engine.connect() as connection:
        by_url = (await connection.execute(text("SELECT current_database()"))).scalar_one()
    await engine.dispose()
    plain = await asyncpg.connect(server.dsn)
    by_dsn = await plain.fetchval("SELECT current_database()")
    await plain.close()

    assert by_url == by_dsn == "tierlane"


async def test_it_is_private(server: EmbeddedPostgres, tmp_path: Path) -> None:
    """No TCP port; the socket directory and the data are closed to others."""
    assert await _setting(server, "listen_addresses") == ""
    assert stat.S_IMODE((tmp_path / "run").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "postgres").stat().st_mode) == 0o700


async def test_it_does_not_run_as_root(server: EmbeddedPostgres) -> None:
    """As root the server gets the unprivileged uid, else our own."""
    expected = UNPRIVILEGED_ID if os.geteuid() == 0 else os.geteuid()

    assert psutil.Process(server.pid).uids().effective == expected


async def test_text_is_unicode_everywhere(server: EmbeddedPostgres) -> None:
    """Encoding and case mapping do not depend on the locales of the machine."""
    connection = await asyncpg.connect(server.dsn)

    assert await connection.fetchval("SELECT upper('é')") == "É"
    assert await connection.fetchval("SHOW server_encoding") == "UTF8"
    await connection.close()


@pytest.mark.parametrize(("ephemeral", "fsync"), [(True, "off"), (False, "on")])
async def test_an_ephemeral_server_does_without_fsync_only(tmp_path: Path, ephemeral: bool, fsync: str) -> None:
    """What was committed survives every process; whether it survives the machine is what `ephemeral` gives up."""
    server = EmbeddedPostgres(tmp_path, tmp_path / "run", ephemeral=ephemeral)
    await server.start()

    values = [await _setting(server, name) for name in ("fsync", "synchronous_commit", "full_page_writes")]

    await server.stop()
    assert values == [fsync, "on", "on"]


async def _killed(server: EmbeddedPostgres) -> None:
    kill_all(family(server.pid))
    await eventually(lambda: not server.alive, "the end of the server")


async def test_identities_survive_an_early_crash(server: EmbeddedPostgres) -> None:
    """A sequence that was used by the transaction that made it gives no number twice after a SIGKILL soon after."""
    connection = await asyncpg.connect(server.dsn)
    async with connection.transaction():
        await connection.execute("CREATE TABLE kept (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, text text)")
        await connection.execute("INSERT INTO kept (text) SELECT 'before' FROM generate_series(1, 3)")
    await connection.execute("INSERT INTO kept (text) SELECT 'after' FROM generate_series(1, 4)")
    await _killed(server)
    connection.terminate()

    await server.start()

    connection = await asyncpg.connect(server.dsn)
    assert await connection.fetchval("SELECT count(*) FROM kept") == 7
    assert await connection.fetchval("INSERT INTO kept (text) VALUES ('again') RETURNING id") > 7
    await connection.close()


async def test_what_an_ephemeral_server_committed_survives_its_kill(server: EmbeddedPostgres) -> None:
    """SIGKILL of all its processes between commits: each row whose commit was confirmed is there."""
    connection = await asyncpg.connect(server.dsn)
    await connection.execute("CREATE TABLE kept (id int)")
    confirmed: list[int] = []

    async def insert() -> None:
        for number in range(1_000_000):
            await connection.execute("INSERT INTO kept VALUES ($1)", number)
            confirmed.append(number)

    inserting = asyncio.create_task(insert())
    await eventually(lambda: len(confirmed) >= 500, "some hundred commits")
    await _killed(server)
    await asyncio.gather(inserting, return_exceptions=True)  # The connection breaks, in one way or another.
    connection.terminate()

    await server.start()

    connection = await asyncpg.connect(server.dsn)
    found = {row["id"] for row in await connection.fetch("SELECT id FROM kept")}
    await connection.close()
    assert sorted(set(confirmed) - found) == []


async def test_it_recovers_after_a_kill_of_everything(tmp_path: Path) -> None:
    """SIGKILL of all its processes, stale postmaster.pid and socket lock: the next start recovers the data."""
    server = EmbeddedPostgres(tmp_path, tmp_path / "run")
    await server.start()
    connection = await asyncpg.connect(server.dsn)
    await connection.execute("CREATE TABLE kept AS SELECT 1 AS value")
    await connection.close()
    await _killed(server)
    assert (tmp_path / "postgres" / "postmaster.pid").exists()
    assert (tmp_path / "run" / ".s.PGSQL.5432.lock").exists()

    await server.start()

    connection = await asyncpg.connect(server.dsn)
    assert await connection.fetchval("SELECT value FROM kept") == 1
    await connection.close()
    await server.stop()


async def test_a_killed_postmaster_with_living_backends_is_no_obstacle(server: EmbeddedPostgres) -> None:
    """SIGKILL of the postmaster alone, with a connection open: the next start works."""
    connection = await asyncpg.connect(server.dsn)
    os.kill(server.pid, signal.SIGKILL)
    await eventually(lambda: not server.alive, "the end of the postmaster")

    await server.start()

    connection.terminate()
    assert await _setting(server, "port") == "5432"


async def test_an_orphan_of_the_same_directory_is_replaced(server: EmbeddedPostgres, tmp_path: Path) -> None:
    """A server that an earlier, killed launcher left running on our directory is stopped first."""
    successor = EmbeddedPostgres(tmp_path, tmp_path / "run", ephemeral=True)

    await successor.start()

    assert not server.alive
    assert successor.alive
    await successor.stop()


async def test_an_interrupted_initdb_is_repeated(tmp_path: Path) -> None:
    """A half-made cluster of an earlier run is thrown away."""
    (tmp_path / "postgres.new" / "base").mkdir(parents=True)
    (tmp_path / "postgres.new" / "PG_VERSION").write_text("18\n")
    server = EmbeddedPostgres(tmp_path, tmp_path / "run", ephemeral=True)

    await server.start()

    assert server.alive
    assert not (tmp_path / "postgres.new").exists()
    await server.stop()


async def test_data_of_another_version_is_refused(tmp_path: Path) -> None:
    """The sentence names both versions."""
    (tmp_path / "postgres").mkdir()
    (tmp_path / "postgres" / "PG_VERSION").write_text("9\n")
    server = EmbeddedPostgres(tmp_path, tmp_path / "run", ephemeral=True)

    with pytest.raises(EmbeddedServerError, match="was created by PostgreSQL 9, but the installed server is version"):
        await server.start()


async def test_a_variable_for_another_port_does_not_matter(
    server: EmbeddedPostgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PGPORT in the environment changes neither the server nor its clients."""
    monkeypatch.setenv("PGPORT", "7777")

    assert await _setting(server, "port") == "5432"


async def test_stop_does_not_wait_for_clients(tmp_path: Path) -> None:
    """An open transaction of a client that says nothing does not delay the stop."""
    server = EmbeddedPostgres(tmp_path, tmp_path / "run", ephemeral=True)
    await server.start()
    connection = await asyncpg.connect(server.dsn)
    await connection.execute("BEGIN")

    await server.stop(grace_s=2.0)

    assert server.returncode == 0
    connection.terminate()


async def test_a_hanging_server_is_killed_with_its_processes(server: EmbeddedPostgres) -> None:
    """A stopped (SIGSTOP) postmaster cannot react; stop ends it and its children."""
    processes = psutil.Process(server.pid).children(recursive=True)
    os.kill(server.pid, signal.SIGSTOP)

    await server.stop(grace_s=0.2)

    assert not server.alive
    await eventually(
        lambda: not any(process.is_running() and process.status() != "zombie" for process in processes), "no children"
    )
