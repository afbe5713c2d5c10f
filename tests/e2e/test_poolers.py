"""A stack behind PgBouncer with its defaults, in session and in transaction mode."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import asyncpg
import pytest

from eventually import eventually
from integration.admin_fixtures import Admin
from integration.ledger_fixtures import own_server
from ledger.jobs import DURABLE, JobSession
from ledger.postgres import SharedSession, closing, connect, pooled
from ledger.revision import current_revision
from load import ALL_WELL, load, one_row_each, unwell, verdict
from pgbouncer import PgBouncer
from stack import Stack, start_stack
from tierlane_local.embedded.postgres import EmbeddedPostgres

__all__ = ["own_server"]

pytestmark = [pytest.mark.surroundings, pytest.mark.timeout(120)]
CALL: dict[str, Any] = {"name": "tests", "connect_timeout_s": 2.0, "statement_timeout_ms": 5000, "settings": DURABLE}
LOCKS = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'"


@pytest.fixture(params=["session", "transaction"])
async def pooler(
    request: pytest.FixtureRequest, tmp_path: Path, own_server: EmbeddedPostgres
) -> AsyncIterator[PgBouncer]:
    """PgBouncer before a server of the test's own."""
    pooler = PgBouncer(tmp_path, own_server, request.param)
    await pooler.start()
    yield pooler
    await pooler.stop(2.0)


in_session_mode = pytest.mark.parametrize("pooler", ["session"], indirect=True)
in_transaction_mode = pytest.mark.parametrize("pooler", ["transaction"], indirect=True)


async def settings_of(connection: Any) -> list[str]:
    names = ("statement_timeout", "synchronous_commit", "timezone", "application_name")
    return [await connection.fetchval("SELECT current_setting($1)", name) for name in names]


async def test_settings_hold_in_both_modes(pooler: PgBouncer, own_server: EmbeddedPostgres) -> None:
    """Those of a pooled connection reach no other one, also after an error; many at a time do not mix their statements."""
    url = pooler.url_for("tierlane")
    expected = ["5s", "on", "UTC", "tests"]
    async with closing(await connect(pooled(url), **CALL)) as connection:
        assert await settings_of(connection) == expected
        with pytest.raises(asyncpg.DivisionByZeroError):
            await connection.fetchval("SELECT 1 / $1::int", 0)
        async with connection.transaction(readonly=True):
            assert await settings_of(connection) == expected
    others = [await connect(pooled(url), **CALL | {"statement_timeout_ms": 1000 * n}) for n in range(1, 9)]
    found = await asyncio.gather(
        *(
            each.fetchval("SELECT current_setting('statement_timeout') || $1::int FROM pg_sleep(0.05)", number)
            for number, each in enumerate(others, 1)
        )
    )
    assert found == [f"{n}s{n}" for n in range(1, 9)]
    for each in others:
        await each.close()
    async with closing(await asyncpg.connect(url, statement_cache_size=0)) as plain, plain.transaction():
        assert await plain.fetchval("SHOW statement_timeout") == "0"


@in_session_mode
async def test_sessions_are_kept_in_session_mode(pooler: PgBouncer) -> None:
    """Also the last one of the pool."""
    url = pooler.url_for("tierlane")
    connections = [await connect(url, **CALL) for _ in range(20)]
    try:
        assert await settings_of(connections[-1]) == ["5s", "on", "UTC", "tests"]
    finally:
        for each in connections:
            await each.close()


@in_transaction_mode
async def test_a_transaction_pool_is_refused_before_a_lock_is_taken(
    pooler: PgBouncer, own_server: EmbeddedPostgres
) -> None:
    """Roles, migrations and the check say so in one sentence; stores of a gateway that was started before do, too."""
    url = pooler.url_for("tierlane")
    with pytest.raises(SharedSession, match="set TIERLANE_DATABASE_DIRECT_URL to PostgreSQL itself"):
        await connect(url, **CALL)
    with pytest.raises(SharedSession):
        await current_revision(url)
    session = JobSession(url, "tests")
    with pytest.raises(Exception, match=r"is a pooler in transaction mode"):
        await session.run(lambda c: c.fetchval("SELECT 1"))
    assert "is a pooler" in str(session.problem)
    checked = await Admin(url).run("check", "-o", "table")
    assert checked.exit_code == 1
    assert "✗ sessions" in checked.stdout
    for role in ("migrate", "scheduler"):
        refused = await asyncio.to_thread(run_role, role, url)
        assert refused.returncode == 1, refused.stdout
        assert refused.stderr.count("\n") == 1
        assert "TIERLANE_DATABASE_DIRECT_URL" in refused.stderr
    async with closing(await asyncpg.connect(own_server.dsn)) as db:
        assert await db.fetchval(LOCKS) == 0


def run_role(role: str, url: str) -> "subprocess.CompletedProcess[str]":
    settings = {"TIERLANE_DATABASE_URL": url, "TIERLANE_REDIS_URL": "redis://127.0.0.1:9", "PATH": "/usr/bin:/bin"}
    command = [sys.executable, "-m", "tierlane", role]
    return subprocess.run(command, env=settings, capture_output=True, text=True, timeout=30, check=False)


def urls(pooler: PgBouncer, server: EmbeddedPostgres) -> dict[str, str]:
    """The settings of a stack behind the pooler."""
    behind = {"TIERLANE_DATABASE_URL": pooler.url_for("tierlane")}
    return behind | ({"TIERLANE_DATABASE_DIRECT_URL": server.url} if pooler.mode == "transaction" else {})


async def test_a_stack_behind_a_pooler(pooler: PgBouncer, own_server: EmbeddedPostgres, tmp_path: Path) -> None:
    """Requests, jobs and files are stored and audited, changes are applied at once, and the check passes."""
    environment = urls(pooler, own_server)
    options = ("--backend", "simulated:5", "--workers", "1")
    with start_stack(tmp_path / "stack", *options, environment=environment) as stack:
        await stack.healthy(1)
        ids = [await answered(stack) for _ in range(3)]
        job = await job_result(stack)
        file_id = await uploaded(stack)
        assert file_id.startswith("file-")
        assert len(await stack.audited([*ids, job])) == 4
        levels = await checked(stack, environment)
        assert {name for name, level in levels.items() if level == "fail"} == set()
        assert ("postgresql pooler" in levels) is (pooler.mode == "transaction")
        admin = Admin(stack.info.database_url)
        await admin.done("customer", "suspend", "demo-free")
        await eventually(lambda: rejected(stack), "the suspension is applied", 2.0)
    async with closing(await asyncpg.connect(own_server.dsn)) as db:
        # The pool keeps its sessions, and none has a lock that belongs to nobody.
        await eventually(lambda: db.fetchval(f"SELECT ({LOCKS}) = 0"), "no lock is left")


async def test_a_killed_pooler_loses_nothing(pooler: PgBouncer, own_server: EmbeddedPostgres, tmp_path: Path) -> None:
    """It is away for five seconds under load: no request fails, and each has one row."""
    environment = urls(pooler, own_server)
    options = ("--backend", "simulated:5", "--workers", "2")
    with start_stack(tmp_path / "stack", *options, environment=environment) as stack:
        await stack.healthy(2)
        loading = asyncio.create_task(load(stack, 40.0, 15.0, ("enterprise", "paid", "free")))
        await asyncio.sleep(3.0)
        os.kill(pooler.pid, signal.SIGKILL)
        await eventually(lambda: not pooler.alive, "it has ended")
        await asyncio.sleep(5.0)
        await pooler.start()
        answers = await loading

        assert verdict(answers) == ALL_WELL, unwell(answers)[:3]
        await one_row_each(stack, answers)
        await stack.healthy(2)


async def answered(stack: Stack) -> str:
    async with (
        aiohttp.ClientSession(stack.url, headers=stack.headers("free")) as http,
        http.post("/v1/inference", json={"input": "hello"}) as response,
    ):
        assert response.status == 200, await response.text()
        return str((await response.json())["request_id"])


async def rejected(stack: Stack) -> bool:
    async with (
        aiohttp.ClientSession(stack.url, headers=stack.headers("free")) as http,
        http.post("/v1/inference", json={"input": "hello"}) as response,
    ):
        return response.status == 403


async def job_result(stack: Stack) -> str:
    headers = stack.headers("free") | {"Prefer": "respond-async"}
    async with aiohttp.ClientSession(stack.url, headers=headers) as http:
        async with http.post("/v1/inference", json={"input": "hello"}) as response:
            assert response.status == 202, await response.text()
            task_id = str((await response.json())["task_id"])

        async def ended() -> bool:
            async with http.get(f"/v1/result/{task_id}") as response:
                return bool((await response.json())["status"] == "SUCCESS")

        await eventually(ended, "the job has ended")
    return task_id


async def uploaded(stack: Stack) -> str:
    form = aiohttp.FormData({"purpose": "batch"})
    form.add_field("file", b"{}\n" * 1000, filename="lines.jsonl")
    async with (
        aiohttp.ClientSession(stack.url, headers=stack.headers("free")) as http,
        http.post("/v1/files", data=form) as response,
    ):
        assert response.status == 200, await response.text()
        return str((await response.json())["id"])


async def checked(stack: Stack, environment: Mapping[str, str]) -> dict[str, str]:
    """The level of each line of `tierlane check`."""
    seen = stack.info
    rest = {"TIERLANE_REDIS_URL": seen.redis_url, "TIERLANE_SERVICE_TOKEN": seen.service_token}
    admin = Admin(environment["TIERLANE_DATABASE_URL"])
    shown = await admin.run("check", "--url", stack.url, "-o", "json", env=dict(environment) | rest)
    return {f"{each['group']} {each['name']}": each["level"] for each in json.loads(shown.stdout)["checks"]}
